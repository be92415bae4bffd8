"""Everything that the next sync tells the cache manager."""

from protos.kvcache.v1 import kvcache_pb2 as pb
from scheduler.bridge import Report
from scheduler.sequence import Progress


class SyncBatch:
    """Reports of any number of steps, merged."""

    def __init__(self) -> None:
        self.step = 0
        self.progress: dict[int, Progress] = {}
        self.released: list[int] = []
        self.trimmed: dict[int, int] = {}
        self.cancelled_tickets: list[int] = []
        # Sequences that did not move but want blocks.
        self.starving: dict[int, int] = {}
        # Sequences that want blocks of their own; whether any asks for the first time; those that moved into theirs.
        self.evicting: set[int] = set()
        self.moved: dict[int, int] = {}
        self._asks = False

    @property
    def urgent(self) -> bool:
        """Whether there is news; a wish for blocks alone is none."""
        news = self.progress or self.released or self.trimmed or self.cancelled_tickets or self.moved
        return bool(news) or self._asks

    def merge(self, report: Report) -> None:
        """Adds what a step brought."""
        self.step = max(self.step, report.step)
        for handle, progress in report.progress.items():
            mine = self.progress.setdefault(handle, Progress(0))
            mine.computed = progress.computed
            mine.token_ids += progress.token_ids
        self.released += report.released
        self.cancelled_tickets += report.cancelled_tickets
        self.trimmed.update(report.trimmed)
        self.starving.update(report.starving)
        self.evicting.update(report.evicting)
        self._asks |= any(report.evicting.values())
        self.moved.update(report.moved)
        for handle in report.released:
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
            moved_handles=self.moved.keys(),
            moved_computed_tokens=self.moved.values(),
        )
        for handle, computed in self.starving.items():
            self.progress.setdefault(handle, Progress(computed))
        for handle, progress in self.progress.items():
            message.handles.append(handle)
            message.computed_tokens.append(progress.computed)
            message.new_token_counts.append(len(progress.token_ids))
            message.new_token_ids.extend(progress.token_ids)
        return message
