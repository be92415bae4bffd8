"""Syncs with the cache manager: what a request reports, and what its answer means to the step loop."""

from collections.abc import Iterable

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.columns import cut
from scheduler.bridge import CacheUpdate, SyncAnswer
from scheduler.request import Tier
from scheduler.sequence import Copy, Progress


def sync_request(
    update: CacheUpdate, scheduler_id: str, scheduler_epoch: int, manager_epoch: int, number: int
) -> pb.SyncSequencesRequest:
    """Builds the request that reports an update, in columns."""
    message = pb.SyncSequencesRequest(
        scheduler_id=scheduler_id,
        scheduler_epoch=scheduler_epoch,
        manager_epoch=manager_epoch,
        sync_number=number,
        step=update.step,
        released_handles=update.released,
        trimmed_handles=update.trimmed.keys(),
        trimmed_capacity_tokens=update.trimmed.values(),
        cancelled_tickets=update.cancelled_tickets,
        evicting_handles=sorted(update.evicting),
        evicted_handles=update.relocated.keys(),
        computed_tokens_before_eviction=update.relocated.values(),
        window_handles=update.windows.keys(),
        window_tokens=update.windows.values(),
    )
    if update.evicting_windows:
        message.evicting_window_tokens.extend(update.evicting_windows.get(h, 0) for h in message.evicting_handles)
    for handle, computed in update.starving.items():
        update.progress.setdefault(handle, Progress(computed))
    for handle, progress in update.progress.items():
        message.handles.append(handle)
        message.computed_tokens.append(progress.computed)
        message.new_token_counts.append(len(progress.token_ids))
        message.new_token_ids.extend(progress.token_ids)
    return message


def sync_answer(update: CacheUpdate, answer: pb.SyncSequencesResponse, session: int) -> SyncAnswer:
    """Converts the answer to an update's request. session: number of the executor session in which it was sent."""
    slots = cut(answer.extended_slots, answer.extended_counts)
    extensions = zip(answer.extended_handles, answer.extended_groups, map(list, slots), strict=True)
    tables = cut(answer.evicting_slots, answer.evicting_counts)
    return SyncAnswer(
        list(extensions),
        # A live sequence that the manager does not know (after its executor was lost, say) has no blocks either.
        [*answer.void_handles, *answer.unknown_handles],
        answer.missing_blocks,
        update.released,
        list(update.trimmed),
        list(update.relocated),
        list(zip(answer.evicting_handles, map(list, tables), answer.evicting_window_tokens, strict=True)),
        dict(zip(answer.window_handles, answer.window_tokens, strict=True)),
        update.windows.keys(),
        copies(answer.transfers),
        session,
    )


def copies(transfers: Iterable[pb.Transfer]) -> tuple[Copy, ...]:
    """Returns the copies that an answer asks for, in its order."""
    return tuple(
        Copy(t.ticket, t.group, t.source_slot, t.target_slot, _tier(t.source_tier), _tier(t.target_tier), t.num_tokens)
        for t in transfers
    )


def _tier(tier: int) -> Tier:
    return Tier(tier or Tier.DEVICE)
