"""Converts between operators' messages and the domain's types, one function per message. Nothing is decided here."""

from cachemgr import types
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.blocks.hit_counters import TokenCount, TokenMeter
from cachemgr.blocks.tier import Tier
from cachemgr.rpc.convert import CAUSES, TIERS, block, extra_keys, lease, pool, receipt, tier
from cachemgr.sequences.holds import Pinned
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.durations import duration

_REASONS = {reason: f"MISS_REASON_{reason.name if reason else 'UNSPECIFIED'}" for reason in types.MissReason}


def prefix(selector: pb.PrefixSelector) -> types.Prefix:
    """Converts a prompt in one cache scope."""
    return types.Prefix(
        tuple(selector.token_ids),
        selector.executor_id,
        selector.salt if selector.HasField("salt") else None,
        selector.adapter_id if selector.HasField("adapter_id") else None,
        extra_keys(selector.extra_keys),
    )


def block_filter(selected: pb.BlockFilter) -> types.BlockFilter:
    """Converts an operator's selection of blocks. Raises InvalidField for an unknown tier."""
    has_priority = selected.HasField("max_retention_priority")
    return types.BlockFilter(
        pool_id=selected.pool_id,
        salt=selected.salt if selected.HasField("salt") else None,
        max_priority=selected.max_retention_priority if has_priority else None,
        session_id=selected.session_id if selected.HasField("session_id") else None,
        tenant_id=selected.tenant_id if selected.HasField("tenant_id") else None,
        adapter_id=selected.adapter_id if selected.HasField("adapter_id") else None,
        tier=tier("filter.tier", selected.tier),
        prefix=prefix(selected.prefix) if selected.HasField("prefix") else None,
    )


def forget_target(request: pb.ForgetBlocksRequest) -> types.ForgetTarget:
    target = request.WhichOneof("target")
    return types.ForgetTarget(
        salt=request.salt if target == "salt" else None,
        session_id=request.session_id if target == "session_id" else None,
        prefix=prefix(request.prefix) if target == "prefix" else None,
    )


def forgotten(receipt: types.Forgotten) -> pb.ForgetBlocksResponse:
    return pb.ForgetBlocksResponse(
        removed=_tier_counts(receipt.removed),
        used_blocks=receipt.used_blocks,
        shared_blocks=receipt.shared_blocks,
        zeroing_blocks=receipt.zeroing_blocks,
    )


def resized(resized: types.Resized) -> pb.UpdatePoolResponse:
    return pb.UpdatePoolResponse(
        pool=pool(resized.pool),
        degraded_hold_names=resized.degraded,
        offloaded_blocks=resized.left.offloaded,
        dropped=_tier_counts(resized.left.dropped),
    )


def _tier_counts(counts: dict[types.TierKind, int]) -> list[pb.TierCount]:
    return [pb.TierCount(tier=TIERS[tier], num_blocks=count) for tier, count in sorted(counts.items())]


def account(request: pb.DeleteQuotaRequest) -> types.Quota:
    which = request.WhichOneof("account")
    return types.Quota(
        tenant_id=request.tenant_id if which == "tenant_id" else None, salt=request.salt if which == "salt" else None
    )


def pinned(found: list[Pinned]) -> pb.PinPrefixResponse:
    """Makes the answer for all executors: the receipt of the executor that pinned most, with all names."""
    best = max(found, key=lambda one: one.receipt.num_blocks, default=None)
    if best is None:
        return pb.PinPrefixResponse(
            receipt=common.RetentionReceipt(
                request="pin", outcome="OUTCOME_REJECTED", reason="no executor is registered"
            )
        )
    return pb.PinPrefixResponse(
        hold_name=best.name,
        hold_names=[one.name for one in found if one.name],
        receipt=receipt(best.receipt),
        degraded_hold_names=[name for one in found for name in one.degraded],
    )


def hold(view: types.HoldView) -> pb.Hold:
    return pb.Hold(
        name=view.name,
        pin=view.pin,
        owner=view.owner,
        remaining_duration=duration(view.remaining),
        executor_id=view.executor_id,
        num_blocks=view.num_blocks,
    )


def block_lease(view: types.BlockView, held: types.LeaseView) -> pb.BlockLease:
    return pb.BlockLease(block=block(view), lease=lease(held))


def cached_prefix(view: types.PrefixView) -> pb.CachedPrefix:
    return pb.CachedPrefix(
        last_block=block(view.last_block),
        num_tokens=view.num_tokens,
        blocks=_tier_counts(view.blocks),
        min_retention_priority=view.min_priority,
    )


def explanation(found: types.Explanation) -> pb.Explanation:
    lost = found.removal
    return pb.Explanation(
        executor_id=found.executor_id,
        cached_tokens=found.cached_tokens,
        blocks=[
            pb.ExplainedBlock(block=block(view), leases=[lease(one) for one in leases], last_hit_age=duration(age))
            for view, leases, age in found.blocks
        ],
        miss_reason=_REASONS[found.miss_reason],
        removal=None
        if lost is None
        else pb.Removal(
            cause=CAUSES[lost.cause],
            age=duration(found.removal_age),
            for_sequence_id=lost.for_sequence_id,
            retention_priority=lost.priority,
        ),
    )


def stats(pool: BlockPool | None, meter: TokenMeter, tokens: TokenCount) -> pb.GetStatsResponse:
    """The lookups of a pool, in total and in a window; its other counters if the caller may see them."""
    salts = sorted(meter.salts.items(), key=lambda item: -item[1].queried)
    per_salt = [pb.SaltStats(salt=salt, tokens=_tokens(count)) for salt, count in salts]
    if meter.others.queried:
        per_salt.append(pb.SaltStats(others=True, tokens=_tokens(meter.others)))
    return pb.GetStatsResponse(
        tiers=[] if pool is None else [_tier_stats(tier) for tier in pool.tiers if tier.size],
        tokens=_tokens(tokens),
        salts=per_salt,
        honoured_leases=0 if pool is None else pool.honoured_leases,
        broken_leases=0 if pool is None else pool.broken_leases,
    )


def ghost_caches(found: tuple[types.GhostReport, types.PoolView] | None) -> pb.GetGhostCachesResponse:
    if found is None:
        return pb.GetGhostCachesResponse()
    report, pool = found
    return pb.GetGhostCachesResponse(
        caches=[
            pb.GhostCache(
                policy=f"GHOST_POLICY_{one.policy.name}",
                total_blocks=one.total_blocks,
                hit_blocks=one.hit_blocks,
                hit_tokens=one.hit_tokens,
            )
            for one in report.caches
        ],
        tokens=_tokens(TokenCount(report.queried_tokens, report.hit_tokens)),
        queried_blocks=report.queried_blocks,
        device_blocks=pool.total_blocks,
        tier_blocks=pool.total_blocks + sum(tier.total_blocks for tier in pool.lower_tiers if tier.tier),
        sample_rate=report.sample_rate,
    )


def _tokens(count: TokenCount) -> pb.TokenStats:
    return pb.TokenStats(queried_tokens=count.queried, hit_tokens=count.hit)


def _tier_stats(tier: Tier) -> pb.TierStats:
    counters = tier.counters
    return pb.TierStats(
        tier=TIERS[tier.kind],
        total_blocks=tier.total,
        free_blocks=tier.free,
        used_blocks=tier.used,
        cached_blocks=tier.cached,
        evictable_blocks=sum(order.size for order in tier.accounts.orders()),
        allocated_blocks=counters.allocated,
        removed=[
            pb.CauseCount(cause=CAUSES[cause], num_blocks=counters.removed[cause])
            for cause in types.RemovalCause
            if counters.removed[cause]
        ],
        offloaded_blocks=counters.offloaded,
        onloaded_blocks=counters.onloaded,
        copied_bytes=counters.copied_bytes,
        failed_copies=counters.failed_copies,
        mean_idle_before_eviction=duration(max(0.0, counters.mean_idle_before_eviction)),
    )


def preview(found: types.Preview) -> pb.PreviewAdmissionResponse:
    return pb.PreviewAdmissionResponse(
        admitted=found.admitted,
        missing_blocks=found.missing_blocks,
        cached_tokens=found.cached_tokens,
        estimates=[_estimate(one) for one in found.estimates],
    )


def _estimate(found: types.BlockEstimate) -> pb.BlockEstimate:
    return pb.BlockEstimate(
        group=found.group,
        reusable_blocks=found.reusable,
        next_step_blocks=found.next_step,
        completion_blocks=found.completion,
    )
