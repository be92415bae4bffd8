"""A sync, which takes columns of progress and returns columns of capacity."""

from collections.abc import Container, Iterator
from collections.abc import Sequence as Seq

from cachemgr.sequences import token_eviction
from cachemgr.sequences.admission import grow, watermark
from cachemgr.sequences.clients import Executor, Scheduler
from cachemgr.sequences.commit import commit_computed_blocks, commit_last_block, retract_pending
from cachemgr.sequences.copies import Outcome
from cachemgr.sequences.release import end_copy, release
from cachemgr.sequences.sequence import Sequence
from cachemgr.sequences.token_eviction_state import blocks_for
from cachemgr.types import ManagerConfig, SyncAnswer, SyncRequest, WindowChange
from protos.errors import InvalidField
from protos.kvcommon.eviction import Kind

_HANDLES = (
    *("handles", "released_handles", "trimmed_handles"),
    *("evicting_handles", "evicted_handles", "window_handles"),
)


class Sync:
    """One request of one scheduler. `check` changes nothing; `apply` cannot fail after it."""

    def __init__(
        self,
        request: SyncRequest,
        scheduler: Scheduler,
        executors: dict[str, Executor],
        config: ManagerConfig,
    ) -> None:
        self._request = request
        self._scheduler = scheduler
        self._executors = executors
        self._config = config
        self._running: list[Sequence] = []
        self.answer = SyncAnswer()
        self.released: list[Sequence] = []
        # Kinds of policy of the sequences that have begun to evict in this sync.
        self.evicted: list[Kind] = []
        # Changes of adaptive windows.
        self.windows: list[WindowChange] = []

    def check(self) -> None:
        """Raises InvalidField for columns that do not fit each other or the known state."""
        request = self._request
        _same_length("computed_tokens", request.computed_tokens, request.handles)
        _same_length("new_token_counts", request.new_token_counts, request.handles)
        _same_length("trimmed_capacity_tokens", request.trimmed_capacity_tokens, request.trimmed_handles)
        _same_length(
            "computed_tokens_before_eviction", request.computed_tokens_before_eviction, request.evicted_handles
        )
        _same_length("window_tokens", request.window_tokens, request.window_handles)
        if request.evicting_window_tokens:
            _same_length("evicting_window_tokens", request.evicting_window_tokens, request.evicting_handles)
        for field in _HANDLES:
            column = getattr(request, field)
            if len(set(column)) != len(column):
                raise InvalidField(field, "must not name a sequence twice")
        if sum(request.new_token_counts) != len(request.new_token_ids):
            raise InvalidField("new_token_ids", "must have as many entries as new_token_counts says")
        known = self._check_progress()
        token_eviction.check_columns(request, self._scheduler.sequences)
        token_eviction.check_windows(request, self._scheduler.sequences)
        trims = zip(request.trimmed_handles, request.trimmed_capacity_tokens, strict=True)
        for row, (handle, capacity) in enumerate(trims):
            sequence = self._scheduler.sequences.get(handle)
            if sequence is None or sequence.void:
                continue
            # The last known token may have been sampled after the trim; it has no slot until it is computed.
            if capacity < sequence.slots_for(known.get(handle, len(sequence.tokens)) - 1):
                raise InvalidField(f"trimmed_capacity_tokens[{row}]", "must not be less than the computed tokens")

    def _check_progress(self) -> dict[int, int]:
        """Returns the number of known tokens by handle. Raises InvalidField."""
        request, moved = self._request, set(self._request.evicted_handles)
        known: dict[int, int] = {}
        columns = zip(request.handles, request.computed_tokens, request.new_token_counts, strict=True)
        for row, (handle, computed, count) in enumerate(columns):
            sequence = self._scheduler.sequences.get(handle)
            if sequence is None or sequence.void:
                continue
            most = known[handle] = len(sequence.tokens) + count
            if handle not in moved and not sequence.has_evicted_tokens:
                most = min(most, sequence.most_computed)
            if not sequence.computed <= computed <= most:
                raise InvalidField(f"computed_tokens[{row}]", f"must be from {sequence.computed} to {most}")
        return known

    def apply(self, now: float) -> SyncAnswer:
        """Applies progress, then evictions, releases, trims and cancellations; then grants capacity."""
        self._progress()
        for handle in self._request.released_handles:
            sequence = self._find(handle)
            if sequence is not None:
                release(sequence, now)
                self.released.append(sequence)
        self._trim()
        self._shorten_windows()
        self._cancel()
        self._extend(now)
        self.answer.void_handles = sorted(self._scheduler.void)
        used = [self._executors[name] for name in self._scheduler.executors if name in self._executors]
        pools = [pool for executor in used for pool in executor.pools]
        if pools:
            fullest = min(pools, key=lambda pool: pool.device.free)
            self.answer.free_blocks, self.answer.total_blocks = fullest.device.free, fullest.device.total
        return self.answer

    def _find(self, handle: int) -> Sequence | None:
        sequence = self._scheduler.sequences.get(handle)
        if sequence is None:
            self.answer.unknown_handles.append(handle)
        return sequence

    def _progress(self) -> None:
        request, at = self._request, 0
        clean = dict(zip(request.evicted_handles, request.computed_tokens_before_eviction, strict=True))
        moved: list[tuple[Sequence, int]] = []
        columns = zip(request.handles, request.computed_tokens, request.new_token_counts, strict=True)
        for handle, computed, count in columns:
            start, at = at, at + count
            sequence = self._find(handle)
            if sequence is None or sequence.void:
                continue
            if count:
                sequence.tokens.extend(request.new_token_ids[start:at])
            if handle in clean:
                moved.append((sequence, computed))
            self._advance(sequence, clean.pop(handle, computed))
        for handle, computed in clean.items():
            sequence = self._find(handle)
            if sequence is not None and not sequence.void:
                moved.append((sequence, computed))
                self._advance(sequence, computed)
        # Older sequences come first, since they fill the blocks that younger sequences share.
        self._running.sort(key=_handle)
        for sequence in self._running:
            commit_computed_blocks(sequence)
        for sequence, computed in moved:
            self._move(sequence, computed)

    def _advance(self, sequence: Sequence, computed: int) -> None:
        sequence.computed = computed
        sequence.step = max(sequence.step, self._request.step)
        self._running.append(sequence)

    def _move(self, sequence: Sequence, computed: int) -> None:
        # Before the last block is committed, since sequences that share the pending block expect a full block.
        retract_pending(sequence)
        commit_last_block(sequence)
        token_eviction.move(sequence)
        assert sequence.eviction is not None
        self.evicted.append(sequence.eviction.policy.kind)
        sequence.computed = computed

    def _trim(self) -> None:
        request = self._request
        for handle, capacity in zip(request.trimmed_handles, request.trimmed_capacity_tokens, strict=True):
            sequence = self._find(handle)
            if sequence is None or sequence.void:
                continue
            keep = blocks_for(capacity, sequence.block_size)
            retract_pending(sequence, keep)
            for table in sequence.tables:
                table.cut(keep)

    def _cancel(self) -> None:
        """Cancels only the scheduler's own copies: only their receiver knows that it never sent them."""
        for number in self._request.cancelled_tickets:
            for executor in self._executors.values():
                ticket = executor.tickets.get(number)
                if ticket is not None and ticket.scheduler is self._scheduler:
                    del executor.tickets[number]
                    end_copy(ticket, Outcome.CANCELLED)

    def _extend(self, now: float) -> None:
        """Grants capacity: for the next two steps first, then ahead of need."""
        trimmed = set(self._request.trimmed_handles)
        running = [sequence for sequence in self._running if not sequence.void and self._is_live(sequence)]
        before = {sequence: sequence.num_blocks for sequence in running}
        for sequence in running:
            tokens = max(len(sequence.tokens), sequence.computed + 2)
            missing = self._grow(sequence, tokens, above_watermark=False)
            if missing:
                self.answer.missing_blocks += missing
                sequence.executor.short_at = now
        before |= {sequence: sequence.num_blocks for sequence in self._about_to_grow() if sequence not in before}
        self._grant(now)
        self._lengthen_windows(now)
        if not self.answer.missing_blocks:
            for sequence in running:
                if sequence.handle not in trimmed:
                    tokens = len(sequence.tokens) + self._config.capacity_ahead_tokens
                    self._grow(sequence, tokens, above_watermark=True)
        for sequence, start in before.items():
            if sequence.num_blocks > start:
                self._report(sequence, start)

    def _about_to_grow(self) -> Iterator[Sequence]:
        """Yields sequences that may get blocks for longer adaptive windows."""
        for handle in (*self._request.evicting_handles, *self._request.window_handles):
            sequence = self._scheduler.sequences.get(handle)
            if sequence is not None and not sequence.void:
                yield sequence

    def _grant(self, now: float) -> None:
        """Grants blocks to sequences that are about to evict: each gets all of its blocks, or none."""
        handles = self._request.evicting_handles
        wanted = self._request.evicting_window_tokens or [0] * len(handles)
        for handle, window in sorted(zip(handles, wanted, strict=True)):
            sequence = self._find(handle)
            if (
                sequence is None
                or sequence.void
                or sequence.has_evicted_tokens
                or not token_eviction.may_evict(sequence)
            ):
                continue
            missing = token_eviction.grant(sequence, window, self._spare(sequence, now))
            if missing:
                self.answer.missing_blocks += missing
                sequence.executor.short_at = now
            else:
                self.answer.evicting_window_tokens.append(self._count_window(sequence, before=0, window=window))
                self.answer.transfers.extend(sequence.opened.take())
                self.answer.evicting_handles.append(handle)
                self.answer.evicting_counts.append(len(sequence.private))
                self.answer.evicting_slots.extend(block.index for block in sequence.private)

    def _windows(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yields sequences that ask for an adaptive window, with the granted window and the requested window."""
        for handle, tokens in zip(self._request.window_handles, self._request.window_tokens, strict=True):
            sequence = self._find(handle)
            if sequence is not None and not sequence.void:
                assert sequence.eviction is not None
                yield sequence, sequence.eviction.policy.window, tokens

    def _shorten_windows(self) -> None:
        for sequence, before, tokens in self._windows():
            if tokens <= before:
                token_eviction.change_window(sequence, tokens, 0)
                self._answer_window(sequence, before, tokens)

    def _lengthen_windows(self, now: float) -> None:
        """Lengthens windows if no sequence lacks blocks; else has them shortened, before any sequence is preempted."""
        for sequence, before, tokens in self._windows():
            if tokens > before:
                token_eviction.change_window(sequence, tokens, self._spare(sequence, now))
                self._answer_window(sequence, before, tokens)
        for executor in (self._executors[name] for name in self._scheduler.executors if name in self._executors):
            if executor.is_short(now):
                self._take_windows_back(executor, {*self._request.window_handles})

    def _answer_window(self, sequence: Sequence, before: int, tokens: int) -> None:
        self.answer.window_handles.append(sequence.handle)
        self.answer.window_tokens.append(self._count_window(sequence, before=before, window=tokens))

    def _take_windows_back(self, executor: Executor, asked: Container[int]) -> None:
        for handle, sequence in self._scheduler.sequences.items():
            eviction = sequence.eviction
            is_here = sequence.executor is executor and not sequence.void and sequence.has_evicted_tokens
            if is_here and eviction is not None and eviction.granted_blocks and handle not in asked:
                assert eviction.policy.bounds is not None
                self.answer.window_handles.append(handle)
                self.answer.window_tokens.append(eviction.policy.bounds.least)
                if not eviction.is_taken_back:
                    eviction.is_taken_back = True
                    self.windows.append(WindowChange.TAKEN_BACK)

    def _count_window(self, sequence: Sequence, *, before: int, window: int) -> int:
        """Counts a change of a window from `before` after a request for `window`; returns the present window, or 0."""
        eviction = sequence.eviction
        assert eviction is not None
        if eviction.policy.bounds is None:
            return 0
        present = eviction.policy.window
        before = before or eviction.policy.bounds.least
        if present != before:
            self.windows.append(WindowChange.GRANTED if present > before else WindowChange.RETURNED)
        elif window > present:
            self.windows.append(WindowChange.REFUSED)
        return present

    def _spare(self, sequence: Sequence, now: float) -> int:
        """Optional blocks that a sequence may get; none while any sequence lacks blocks."""
        if sequence.executor.is_short(now):
            return 0
        (table,) = sequence.tables
        free = table.pool.device.free_for(sequence.scope.account) - watermark(table.pool, self._config)
        return max(0, free)

    def _is_live(self, sequence: Sequence) -> bool:
        return sequence.handle in self._scheduler.sequences

    def _grow(self, sequence: Sequence, tokens: int, *, above_watermark: bool) -> int:
        """Allocates blocks for N = `tokens` tokens as far as blocks are free; returns how many are missing."""
        wanted = blocks_for(sequence.slots_for(tokens), sequence.block_size)
        have = sequence.num_blocks
        if wanted <= have:
            return 0
        pools = sequence.executor.pools
        account = sequence.scope.account
        # A running sequence may exceed its account's ceiling; the account's cached blocks are evicted first.
        spare = min(
            pool.device.free_for(account, within_ceiling=False)
            - (watermark(pool, self._config) if above_watermark else 0)
            for pool in pools
        )
        given = min(wanted - have, max(0, spare))
        if given:
            grow(sequence, have + given)
        return wanted - have - given

    def _report(self, sequence: Sequence, start: int) -> None:
        self.answer.transfers.extend(sequence.opened.take())
        for table in sequence.slots(start):
            self.answer.extended_handles.append(sequence.handle)
            self.answer.extended_groups.append(table.group)
            self.answer.extended_counts.append(len(table.slots))
            self.answer.extended_slots.extend(table.slots)


def _handle(sequence: Sequence) -> int:
    return sequence.handle


def _same_length(field: str, column: Seq[int], handles: Seq[int]) -> None:
    if len(column) != len(handles):
        raise InvalidField(field, f"must have one entry per handle, {len(handles)}")
