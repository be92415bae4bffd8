"""From the cache manager's answers to what the step loop works with."""

from collections.abc import Iterable

from protos.kvcache.eviction import Layout, parse
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.columns import cut
from scheduler.cache.tier_costs import Tier
from scheduler.core.token_eviction import Eviction
from scheduler.request import Candidate
from scheduler.sequence import Copy, Sequence


def copies(transfers: Iterable[pb.Transfer]) -> tuple[Copy, ...]:
    """Copies, in their order."""
    return tuple(
        Copy(t.ticket, t.group, t.source_slot, t.target_slot, _tier(t.source_tier), _tier(t.target_tier), t.num_tokens)
        for t in transfers
    )


def _tier(tier: int) -> Tier:
    return Tier(tier or Tier.DEVICE)


def extensions(answer: pb.SyncSequencesResponse) -> list[tuple[int, int, list[int]]]:
    """Handle, layer group and slots of every table that grows."""
    entries = cut(answer.extended_slots, answer.extended_counts)
    columns = zip(answer.extended_handles, answer.extended_groups, entries, strict=True)
    return [(handle, group, list(slots)) for handle, group, slots in columns]


def own_blocks(answer: pb.SyncSequencesResponse) -> list[tuple[int, list[int]]]:
    """Handle and slots of every sequence that may evict tokens."""
    tables = cut(answer.evicting_slots, answer.evicting_counts)
    return [(handle, list(slots)) for handle, slots in zip(answer.evicting_handles, tables, strict=True)]


def sequence(candidate: Candidate, answer: pb.AdmitSequenceResponse, block_size: int, now: float) -> Sequence:
    """What was admitted, at `now` on the monotonic clock."""
    tables = sorted(answer.block_tables, key=lambda table: table.group)
    return Sequence(
        candidate,
        answer.sequence_handle,
        cached_tokens=answer.cached_tokens,
        tables=[list(table.slots) for table in tables],
        block_size=block_size,
        wait_for=answer.wait_for_handle,
        copies=copies(answer.transfers),
        onboard_by=now + candidate.request.onboarding_timeout,
        eviction=_eviction(candidate, answer, block_size),
    )


def _eviction(candidate: Candidate, answer: pb.AdmitSequenceResponse, block_size: int) -> Eviction | None:
    if not answer.HasField("eviction_policy"):
        return None
    # The manager has checked what the model can carry.
    policy = parse(answer.eviction_policy, Layout(block_size, (None,), plain_rotary=True))
    return None if policy is None else Eviction(policy, len(candidate.request.prompt_ids))
