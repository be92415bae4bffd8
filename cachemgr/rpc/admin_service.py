"""The operators' gRPC service: parse, call the manager, convert. Errors of a manager's method reach the caller."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask

from cachemgr.blocks.block import Account
from cachemgr.blocks.hit_counters import MAX_WINDOW_SECONDS
from cachemgr.operators.state_dump import hashed
from cachemgr.persistence.records import quota_message, quota_of, rule_message, rule_of
from cachemgr.rpc import convert, convert_admin, paging, tenancy
from cachemgr.rpc.mutations import ServiceContext, kept, long_mutation, mutation
from cachemgr.slices import Slices, sliced, steady
from cachemgr.types import BlockFilter, BlockView, HoldView, PoolViolation, Quota, RetentionRule
from cachemgr.validation import check_id
from protos.errors import InvalidField, ServiceError
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.durations import seconds

# gRPC passes every method its context, which is not needed here.
# ruff: noqa: N802, ARG002

_DUMP_LINES = 1000

T = TypeVar("T")


class CacheAdminService(pb_grpc.CacheAdminServiceServicer):
    """Queries and commands of operators."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self._manager = context.manager

    async def CheckPool(self, request: pb.CheckPoolRequest, context: Any) -> pb.CheckPoolResponse:
        """Recounts the blocks; Redis is compared only on request."""
        manager = self._manager
        found = [
            one
            for part in manager.queries.check_pool_in_parts(request.pool_id)
            for one in await steady(part, manager.queries.fingerprint)
        ]
        pools = [self._manager.queries.pool(request.pool_id)] if request.pool_id else self._manager.queries.pools()
        differences = None
        store = self.context.store
        if request.compare_with_store and store is not None:
            differences = await store.compare(dict.fromkeys(pool.executor_id for pool in pools))
        for one in differences or ():
            pool_id = f"{one.executor_id}/{one.group}" if one.executor_id else ""
            if request.pool_id in ("", pool_id) or not pool_id:
                found.append(PoolViolation(pool_id, one.slot, one.message))
        return pb.CheckPoolResponse(
            violations=[pb.PoolViolation(pool_id=one.pool_id, slot=one.slot, message=one.message) for one in found],
            pools=[convert.pool(view) for view in pools],
            store_compared=differences is not None,
        )

    async def ListPools(self, request: pb.ListPoolsRequest, context: Any) -> pb.ListPoolsResponse:
        """Lists pools by name."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_token("pools", request.page_token)
        rest = (view for view in self._manager.queries.pools() if view.pool_id > after)
        page, token = paging.cut(rest, limit, "pools", lambda view: view.pool_id)
        return pb.ListPoolsResponse(
            pools=[tenancy.redact_pool(convert.pool(view)) for view in page], next_page_token=token
        )

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        found = convert.pool(self._manager.queries.pool(_required_pool(request.pool_id)))
        return pb.GetPoolResponse(pool=tenancy.redact_pool(found))

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksResponse:
        """Lists blocks of a pool by slot."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_number("blocks", request.page_token)
        pool_id = _required_pool(request.pool_id)
        rest: Iterable[tuple[int, BlockView] | None]
        if request.HasField("filter"):
            rest = self._manager.queries.filtered_blocks(_in_pool(request.filter, pool_id), after)
        else:
            rest = self._manager.queries.blocks(pool_id, after)
        seen = (item if item is not None and tenancy.sees(item[1].scope) else None for item in rest)
        page, token = await paging.cut_in_slices(seen, limit, "blocks", _slot)
        blocks = [convert.block(view, token_ids=request.include_token_ids) for _, view in page]
        return pb.ListBlocksResponse(blocks=blocks, next_page_token=token)

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: Any) -> pb.ListPrefixesResponse:
        """Lists chains by the slot of their last block."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_number("prefixes", request.page_token)
        rest = self._manager.queries.prefixes(_in_pool(request.filter, _required_pool(request.pool_id)), after)
        seen = (view if view is not None and tenancy.sees(view.last_block.scope) else None for view in rest)
        page, token = await paging.cut_in_slices(seen, limit, "prefixes", lambda view: view.index)
        return pb.ListPrefixesResponse(
            prefixes=[convert_admin.cached_prefix(view) for view in page], next_page_token=token
        )

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.ListLeasesResponse:
        """Lists leases by the slot of their block; a page has all leases of its last block."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_number("leases", request.page_token)
        found: list[pb.BlockLease] = []
        last, more = after, False
        leases = self._manager.queries.leases(_required_pool(request.pool_id), request.holder, after)
        async for part in sliced(leases):
            for place, view, lease in (item for item in part if item is not None and tenancy.sees(item[1].scope)):
                if len(found) >= limit and place != last:
                    more = True
                    break
                last = place
                found.append(convert_admin.block_lease(view, lease))
            if more:
                break
        token = paging.encode_token("leases", str(last)) if more else ""
        return pb.ListLeasesResponse(leases=found, next_page_token=token)

    async def ListHolds(self, request: pb.ListHoldsRequest, context: Any) -> pb.ListHoldsResponse:
        seen = sorted(filter(tenancy.sees_hold, self._manager.queries.holds(request.owner)), key=_hold_key)
        page, token = await _keyed(seen, _hold_key, (str, int, str), request, "holds")
        return pb.ListHoldsResponse(holds=[convert_admin.hold(view) for view in page], next_page_token=token)

    async def ListRetentionRules(
        self, request: pb.ListRetentionRulesRequest, context: Any
    ) -> pb.ListRetentionRulesResponse:
        """Lists rules in the order in which they are applied."""
        seen = filter(tenancy.sees_rule, self._manager.queries.rules())
        page, token = await _keyed(seen, _rule_key, (int, str), request, "rules")
        rules = [rule_message(rule) for rule in page]
        return pb.ListRetentionRulesResponse(rules=rules, next_page_token=token)

    async def GetRetentionRule(self, request: pb.GetRetentionRuleRequest, context: Any) -> pb.GetRetentionRuleResponse:
        rule = tenancy.visible_rule(self._manager.queries.rule(request.name))
        return pb.GetRetentionRuleResponse(rule=rule_message(rule))

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        """Lists quotas by account and pool."""
        seen = (usage for usage in self._manager.queries.quotas() if tenancy.sees_account(usage[0]))
        page, token = await _keyed(seen, _quota_key, (str, str, str), request, "quotas")
        quotas = [
            pb.QuotaUsage(quota=quota_message(quota), pool_id=pool_id, device_blocks=device, host_blocks=host)
            for quota, pool_id, device, host in page
        ]
        return pb.ListQuotasResponse(quotas=quotas, next_page_token=token)

    async def ExplainPrefix(self, request: pb.ExplainPrefixRequest, context: Any) -> pb.ExplainPrefixResponse:
        match request.WhichOneof("subject"):
            case "prefix":
                found = self._manager.queries.explain(convert_admin.prefix(request.prefix), request.group)
            case "sequence_id":
                for live in self._manager.queries.sequences():
                    if live.sequence_id == request.sequence_id:
                        tenancy.check_sequence(live.sequence_id, live.scope)
                found = self._manager.queries.explain_sequence(request.sequence_id, request.group)
            case _:
                raise InvalidField("subject", "must be a prefix or a sequence_id")
        return pb.ExplainPrefixResponse(
            explanations=[convert_admin.explanation(tenancy.redact_explanation(one)) for one in found]
        )

    async def PreviewAdmission(self, request: pb.PreviewAdmissionRequest, context: Any) -> pb.PreviewAdmissionResponse:
        """Returns the outcome that an admission would have; changes nothing."""
        try:
            admission = convert.admit_request(request.admission)
            found = self._manager.queries.preview(admission, request.max_new_tokens)
        except ServiceError as error:
            error.fields = {
                field if field == "max_new_tokens" else f"admission.{field}": text
                for field, text in error.fields.items()
            }
            raise
        return convert_admin.preview(found)

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        pool_id = _required_pool(request.pool_id)
        (pool,) = self._manager.queries.block_pools(pool_id)
        meter = tenancy.visible_lookups(pool.tokens)
        since = _begin(request, self._manager.queries.now)
        tokens = meter.total if since is None else meter.since(since)
        return convert_admin.stats(pool if tenancy.sees_all() else None, meter, tokens)

    async def GetGhostCaches(self, request: pb.GetGhostCachesRequest, context: Any) -> pb.GetGhostCachesResponse:
        """Returns the hits of caches of different sizes and policies."""
        if not request.executor_id:
            raise InvalidField("executor_id", "must name a registered executor")
        since = _begin(request, self._manager.queries.now)
        return convert_admin.ghost_caches(self._manager.queries.ghosts(request.executor_id, since))

    async def DumpState(self, request: pb.DumpStateRequest, context: Any) -> AsyncIterator[pb.DumpStateResponse]:
        """Streams the state as of one moment, in pieces."""
        lines = await steady(self._state, self._manager.queries.fingerprint)
        digest = sha256()
        # Taken from the end and released at once, since freeing all together would take long.
        lines.reverse()
        while lines:
            part = lines[: -_DUMP_LINES - 1 : -1]
            del lines[-_DUMP_LINES:]
            digest.update(b"".join(map(hashed, part)))
            yield pb.DumpStateResponse(lines=part)
            await asyncio.sleep(0)
        yield pb.DumpStateResponse(state_hash=digest.hexdigest())

    def _state(self) -> Iterable[str]:
        for part in list(self._manager.queries.state_outline()):
            yield from (part,) if isinstance(part, str) else part

    async def ForgetBlocks(self, request: pb.ForgetBlocksRequest, context: Any) -> pb.ForgetBlocksResponse:
        """Forgets blocks, and waits a while for Redis: the receipt says whether Redis has the change."""
        receipt = await self._ForgetBlocks(request)
        if not request.validate_only:
            store = self.context.store
            receipt.store_updated = await self.context.keep() and (store is None or not store.is_restoring)
        return receipt

    @long_mutation
    def _ForgetBlocks(self, request: pb.ForgetBlocksRequest) -> Slices[pb.ForgetBlocksResponse]:
        target = convert_admin.forget_target(request)
        forgotten = yield from self._manager.operators.forget(target, validate_only=request.validate_only)
        return convert_admin.forgotten(forgotten)

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        """Lists sequences by handle."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_number("sequences", request.page_token)
        if request.HasField("salt"):
            check_id("salt", request.salt)
        rest = (
            live
            for live in self._manager.queries.sequences(after)
            if tenancy.sees(live.scope)
            and request.executor_id in ("", live.executor.executor_id)
            and request.scheduler_id in ("", live.scheduler.scheduler_id)
            and (not request.HasField("salt") or live.scope.salt == request.salt)
        )
        page, token = paging.cut(rest, limit, "sequences", lambda live: live.handle)
        return pb.ListSequencesResponse(sequences=[convert.sequence(live) for live in page], next_page_token=token)

    @kept
    @long_mutation
    def PurgeBlocks(self, request: pb.PurgeBlocksRequest) -> Slices[pb.PurgeBlocksResponse]:
        selected = convert_admin.block_filter(request.filter)
        purged = yield from self._manager.operators.purge(
            selected, validate_only=request.validate_only, skip_used=request.skip_used
        )
        return pb.PurgeBlocksResponse(purged_blocks=purged.purged_blocks, used_blocks=purged.used_blocks)

    @kept
    @long_mutation
    def UpdatePool(self, request: pb.UpdatePoolRequest) -> Slices[pb.UpdatePoolResponse]:
        for index, path in enumerate(_paths(request.update_mask)):
            if path != "total_blocks":
                raise InvalidField(f"update_mask.paths[{index}]", "must be total_blocks")
        if not request.pool.pool_id:
            raise InvalidField("pool.pool_id", "must name a pool as ListPools gives it")
        given = request.pool
        resized = yield from self._manager.operators.update_pool(
            given.pool_id, given.total_blocks, given.etag, validate_only=request.validate_only
        )
        return convert_admin.resized(resized)

    @kept
    @long_mutation
    def CreateRetentionRule(self, request: pb.CreateRetentionRuleRequest) -> Slices[pb.CreateRetentionRuleResponse]:
        rule, matching = yield from self._manager.operators.create_rule(
            rule_of(request.rule), validate_only=request.validate_only
        )
        return pb.CreateRetentionRuleResponse(rule=rule_message(rule), matching_blocks=matching)

    @kept
    @long_mutation
    def UpdateRetentionRule(self, request: pb.UpdateRetentionRuleRequest) -> Slices[pb.UpdateRetentionRuleResponse]:
        rule, leases, matching = yield from self._manager.operators.update_rule(
            rule_of(request.rule), _paths(request.update_mask), validate_only=request.validate_only
        )
        return pb.UpdateRetentionRuleResponse(rule=rule_message(rule), changed_leases=leases, matching_blocks=matching)

    @kept
    @long_mutation
    def DeleteRetentionRule(self, request: pb.DeleteRetentionRuleRequest) -> Slices[pb.DeleteRetentionRuleResponse]:
        ended = yield from self._manager.operators.delete_rule(
            request.name, request.etag, validate_only=request.validate_only
        )
        return pb.DeleteRetentionRuleResponse(ended_leases=ended)

    @kept
    @long_mutation
    def SetQuota(self, request: pb.SetQuotaRequest) -> Slices[pb.SetQuotaResponse]:
        quota = yield from self._manager.operators.set_quota(
            quota_of(request.quota), validate_only=request.validate_only
        )
        return pb.SetQuotaResponse(quota=quota_message(quota))

    @kept
    @long_mutation
    def DeleteQuota(self, request: pb.DeleteQuotaRequest) -> Slices[pb.DeleteQuotaResponse]:
        yield from self._manager.operators.delete_quota(convert_admin.account(request))
        return pb.DeleteQuotaResponse()

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        """Pins a prefix. For a tenant, no pin of another tenant is degraded."""
        if not tenancy.sees_all():
            trial = pb.PinPrefixRequest()
            trial.CopyFrom(request)
            trial.validate_only = True
            own = {view.name for view in filter(tenancy.sees_hold, self._manager.queries.holds())}
            if not own.issuperset((await self._PinPrefix(trial)).degraded_hold_names):
                receipt = common.RetentionReceipt(
                    request="pin", outcome="OUTCOME_REJECTED", reason="the budget for pins is used up"
                )
                return pb.PinPrefixResponse(receipt=receipt)
        return await self._PinPrefix(request)

    @kept
    @mutation
    def _PinPrefix(self, request: pb.PinPrefixRequest) -> pb.PinPrefixResponse:
        pinned = self._manager.operators.pin_prefix(
            convert_admin.prefix(request.prefix),
            request.owner,
            seconds(request.duration),
            validate_only=request.validate_only,
        )
        return convert_admin.pinned(pinned)

    async def ReleaseHold(self, request: pb.ReleaseHoldRequest, context: Any) -> pb.ReleaseHoldResponse:
        tenancy.check_hold(request.name, self._manager.queries.holds())
        return await self._ReleaseHold(request)

    @kept
    @mutation
    def _ReleaseHold(self, request: pb.ReleaseHoldRequest) -> pb.ReleaseHoldResponse:
        return pb.ReleaseHoldResponse(freed_blocks=self._manager.operators.release_hold(request.name))


def _paths(update_mask: FieldMask) -> tuple[str, ...]:
    """The fields to change. Raises InvalidField for none, since changing all fields by mistake may cost leases."""
    if not update_mask.paths:
        raise InvalidField("update_mask", "must name at least one field")
    return tuple(update_mask.paths)


def _required_pool(pool_id: str) -> str:
    if not pool_id:
        raise InvalidField("pool_id", "must name a pool as ListPools gives it")
    return pool_id


def _begin(request: pb.GetStatsRequest | pb.GetGhostCachesRequest, now: float) -> float | None:
    """The time at which a request's window begins; None without a window."""
    if not request.HasField("window"):
        return None
    window = seconds(request.window)
    if not 0 < window <= MAX_WINDOW_SECONDS:
        raise InvalidField("window", "must be greater than zero, and at most an hour")
    return now - window


def _in_pool(selected: pb.BlockFilter, pool_id: str) -> BlockFilter:
    if selected.pool_id not in ("", pool_id):
        raise InvalidField("filter.pool_id", "must be empty or the pool_id of the request")
    return replace(convert_admin.block_filter(selected), pool_id=pool_id)


def _slot(item: tuple[int, BlockView]) -> int:
    return item[0]


async def _keyed(
    items: Iterable[T], key: Callable[[T], tuple[Any, ...]], kinds: tuple[type, ...], request: Any, listing: str
) -> tuple[list[T], str]:
    """A page of a listing in order of keys, so that items added or removed between two pages move no other item."""
    limit = paging.page_limit(request.page_size)
    after = paging.decode_key(listing, request.page_token, *kinds)
    rest = (item if key(item) > after else None for item in items)
    return await paging.cut_in_slices(rest, limit, listing, lambda item: json.dumps(key(item)))


def _hold_key(view: HoldView) -> tuple[str, int, str]:
    """Orders holds by executor, then oldest first, then by owner."""
    return view.executor_id, int(view.name.rpartition("-")[2]), view.owner


def _rule_key(rule: RetentionRule) -> tuple[int, str]:
    return rule.order, rule.name


def _quota_key(usage: tuple[Quota, str, int, int]) -> tuple[str, str, str]:
    return *Account(usage[0]).key, usage[1]
