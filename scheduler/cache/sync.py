"""The sync with the cache manager: what its next request reports, and what its answer means to the step loop."""

from collections.abc import Iterable

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.columns import cut
from scheduler.bridge import CacheUpdate, SyncAnswer
from scheduler.request import Tier
from scheduler.sequence import Copy, Progress


class SyncBatch:
    """Updates of any number of steps, merged."""

    def __init__(self) -> None:
        self.step = 0
        self.progress: dict[int, Progress] = {}
        self.released: list[int] = []
        self.trimmed: dict[int, int] = {}
        self.cancelled_tickets: list[int] = []
        # Sequences that made no progress and need blocks.
        self.starving: dict[int, int] = {}
        # Sequences that need private blocks; sequences that moved to theirs.
        self.evicting: set[int] = set()
        self.relocated: dict[int, int] = {}
        self._first_requests = False

    @property
    def urgent(self) -> bool:
        """Whether there is news. A sequence that still needs blocks is none."""
        news = self.progress or self.released or self.trimmed or self.cancelled_tickets or self.relocated
        return bool(news) or self._first_requests

    def merge(self, update: CacheUpdate) -> None:
        """Adds an update."""
        self.step = max(self.step, update.step)
        for handle, progress in update.progress.items():
            mine = self.progress.setdefault(handle, Progress(0))
            mine.computed = progress.computed
            mine.token_ids += progress.token_ids
        self.released += update.released
        self.cancelled_tickets += update.cancelled_tickets
        self.trimmed.update(update.trimmed)
        self.starving.update(update.starving)
        self.evicting.update(update.evicting)
        self._first_requests |= any(update.evicting.values())
        self.relocated.update(update.relocated)
        for handle in update.released:
            self.trimmed.pop(handle, None)
            self.starving.pop(handle, None)
            self.evicting.discard(handle)

    def message(
        self, scheduler_id: str, scheduler_epoch: int, manager_epoch: int, number: int
    ) -> pb.SyncSequencesRequest:
        """The request, in columns."""
        message = pb.SyncSequencesRequest(
            scheduler_id=scheduler_id,
            scheduler_epoch=scheduler_epoch,
            manager_epoch=manager_epoch,
            sync_number=number,
            step=self.step,
            released_handles=self.released,
            trimmed_handles=self.trimmed.keys(),
            trimmed_capacity_tokens=self.trimmed.values(),
            cancelled_tickets=self.cancelled_tickets,
            evicting_handles=sorted(self.evicting),
            evicted_handles=self.relocated.keys(),
            computed_tokens_before_eviction=self.relocated.values(),
        )
        for handle, computed in self.starving.items():
            self.progress.setdefault(handle, Progress(computed))
        for handle, progress in self.progress.items():
            message.handles.append(handle)
            message.computed_tokens.append(progress.computed)
            message.new_token_counts.append(len(progress.token_ids))
            message.new_token_ids.extend(progress.token_ids)
        return message

    def answered(self, answer: pb.SyncSequencesResponse, session: int) -> SyncAnswer:
        """The answer to this batch's request. session: the one with the executor in which it was sent."""
        slots = cut(answer.extended_slots, answer.extended_counts)
        extensions = zip(answer.extended_handles, answer.extended_groups, map(list, slots), strict=True)
        tables = cut(answer.evicting_slots, answer.evicting_counts)
        return SyncAnswer(
            list(extensions),
            # A live sequence that the manager does not know, as after its executor was lost, has no blocks either.
            [*answer.void_handles, *answer.unknown_handles],
            answer.missing_blocks,
            self.released,
            list(self.trimmed),
            list(self.relocated),
            list(zip(answer.evicting_handles, map(list, tables), strict=True)),
            copies(answer.transfers),
            session,
        )


def copies(transfers: Iterable[pb.Transfer]) -> tuple[Copy, ...]:
    """The copies that an answer asks for, in its order."""
    return tuple(
        Copy(t.ticket, t.group, t.source_slot, t.target_slot, _tier(t.source_tier), _tier(t.target_tier), t.num_tokens)
        for t in transfers
    )


def _tier(tier: int) -> Tier:
    return Tier(tier or Tier.DEVICE)
