"""The running batch: the live sequences and every change of their state. The step loop's thread owns it."""

import bisect
from collections import Counter
from collections.abc import Iterable

from protos.execution.v1 import execution_pb2
from scheduler.bridge import CacheUpdate, RequestUpdates, SyncAnswer, TokenMeta
from scheduler.core.executor_loss import Suspects, blame, next_attempt
from scheduler.core.onloading import CopyTracker
from scheduler.core.planner import StepPlan, choose_victim, plan_step, trimmable
from scheduler.core.prefill_budget import PrefillBudget
from scheduler.core.step_message import InFlightStep
from scheduler.errors import ExecutorLostError
from scheduler.request import Tier
from scheduler.sequence import Eviction, LeaveReason, Sequence

# Steps between reports of progress that is not urgent: the cache manager allocates ahead, and a call per step would
# cost it more than all its other work.
GATHER_STEPS = 8
_NO_UPDATES, _NO_CACHE_UPDATE = RequestUpdates(), CacheUpdate()


class RunningBatch:
    """All sequences that hold blocks, in order of rank, started or not.

    A sequence that leaves stays until no step in flight can touch its blocks; only then it is reported as released.
    """

    def __init__(self) -> None:
        # Updates that are not published yet.
        self.updates = RequestUpdates()
        self.cache_update = CacheUpdate()
        # Handles that the next step removes from the executor.
        self.removed: list[int] = []
        # Copies that the next step brings to the executor, and the onloads in flight.
        self.copies = CopyTracker()
        self.missing_blocks = 0
        # Live sequences, and sequences that leave, in order of rank.
        self.ranked: list[Sequence] = []
        self._by_handle: dict[int, Sequence] = {}
        self._by_arrival: dict[int, Sequence] = {}
        # Sequences with an eviction policy.
        self._evicting: dict[int, tuple[Sequence, Eviction]] = {}
        self._suspects = Suspects()
        self._answered = 0
        # By handle of a released sequence: its leading tokens whose blocks other sequences may use, until the cache
        # manager knows of the release.
        self._released: dict[int, int] = {}
        # Handles whose preemption, trim or shorter window is not answered: until it is, no more blocks are reclaimed.
        self._pending_reclaims: set[int] = set()
        self._trimmed_last = False
        # Sequences that leave but that a step in flight may still touch.
        self._leaving: list[Sequence] = []
        # Waiting sequences, by the handle of the sequence whose blocks they wait for.
        self._followers: dict[int, list[Sequence]] = {}
        # The step up to which all progress is reported, and whether the next report is urgent.
        self._reported_step = 0
        self._urgent = False
        # Whether sequences of the last answered step want drafts.
        self._has_drafts = False

    def __len__(self) -> int:
        return len(self.ranked)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prefills that are in no sent step yet."""
        return sum(sequence.remaining for sequence in self.ranked if sequence.remaining > 1)

    def take_updates(self, *, everything: bool = True) -> tuple[RequestUpdates | None, CacheUpdate | None]:
        """Returns the updates since the last call, None for an empty update.

        everything: includes all sequences' progress, which otherwise comes with other news or every GATHER_STEPS.
        """
        urgent = everything or self._urgent or self.cache_update != _NO_CACHE_UPDATE
        if urgent or self._answered >= self._reported_step + GATHER_STEPS:
            self._reported_step, self._urgent = self._answered, False
            for sequence in self.ranked:
                self._report_progress(sequence)
        updates = cache = None
        if self.updates != _NO_UPDATES:
            updates, self.updates = self.updates, RequestUpdates()
        if self.cache_update != _NO_CACHE_UPDATE:
            cache, self.cache_update = self.cache_update, CacheUpdate()
            cache.step = self._answered
        return updates, cache

    def _report_progress(self, sequence: Sequence) -> None:
        if sequence.computed > sequence.synced:
            self.cache_update.progress[sequence.handle] = sequence.take_progress()

    def admit(self, sequence: Sequence, *, valid: bool = True) -> None:
        """Adds an admitted sequence. valid: whether its blocks are valid; otherwise the sequence is admitted again."""
        self._by_handle[sequence.handle] = sequence
        self._by_arrival[sequence.request.arrival] = sequence
        if sequence.eviction is not None:
            self._evicting[sequence.handle] = sequence, sequence.eviction
        self._suspects.add(sequence)
        bisect.insort(self.ranked, sequence, key=lambda item: item.request.rank)
        if valid:
            self.copies.add(sequence)
        else:
            self.cache_update.cancelled_tickets.extend(copy.ticket for copy in sequence.copies)
        promised = sequence.cached_tokens
        writer = sequence.wait_for
        if writer in self._by_handle:
            self._followers.setdefault(writer, []).append(sequence)
        if not valid or (writer not in self._by_handle and self._released.get(writer, promised) < promised):
            self.leave(sequence, LeaveReason.RESTARTED)

    def cancel(self, arrival: int) -> None:
        """Drops a request; an unknown request has already ended."""
        sequence = self._by_arrival.get(arrival)
        if sequence is not None:
            self.leave(sequence, LeaveReason.CANCELLED)

    def apply(self, answer: SyncAnswer, *, valid: bool = True) -> None:
        """Applies a sync's answer. valid: whether the executor still has the memory that its copies concern."""
        if valid:
            self.copies.unsent += answer.copies
        else:
            self.cache_update.cancelled_tickets.extend(copy.ticket for copy in answer.copies)
        for handle in answer.released:
            self._released.pop(handle, None)
        for handle in answer.trimmed:
            if handle in self._by_handle:
                self._by_handle[handle].trim_unanswered = False
        self._pending_reclaims.difference_update(answer.released, answer.trimmed, answer.asked_windows)
        self._apply_evictions(answer)
        for handle, group, slots in answer.extensions:
            sequence = self._by_handle.get(handle)
            # The cache manager appended these slots before it knew of the trim, which frees them.
            if sequence is not None and not sequence.trim_unanswered:
                sequence.extend(group, slots)
        for handle in answer.void_handles:
            if handle in self._by_handle:
                self.leave(self._by_handle[handle], LeaveReason.RESTARTED)
        self.missing_blocks = answer.missing_blocks

    def _apply_evictions(self, answer: SyncAnswer) -> None:
        for handle in answer.relocated:
            if handle in self._evicting:
                self._evicting[handle][1].relocation_synced = True
        for handle, slots, window in answer.private_blocks:
            if handle in self._evicting and self._evicting[handle][1].private_blocks is None:
                eviction = self._evicting[handle][1]
                eviction.private_blocks, eviction.granted_window = slots, window
        for handle, tokens in answer.windows.items():
            if handle in self._evicting:
                eviction = self._evicting[handle][1]
                if handle in answer.asked_windows:
                    eviction.window_unanswered = False
                    eviction.granted_window = tokens
                eviction.granted_window = min(eviction.granted_window, tokens)
                if eviction.granted_window < eviction.policy.window:
                    # Its blocks will be free soon: no sequence is preempted before then.
                    self._pending_reclaims.add(handle)

    def plan(self, max_tokens: int, budget: PrefillBudget | None = None) -> StepPlan:
        """Plans the next step, of at most `max_tokens` tokens; reclaims blocks for sequences that have none left."""
        for sequence, eviction in self._evicting.values():
            if sequence.leave_reason is None and sequence.evict_tokens():
                self.cache_update.evicting[sequence.handle] = not eviction.requested
                if eviction.wanted_window is not None:
                    self.cache_update.evicting_windows[sequence.handle] = eviction.wanted_window
                eviction.requested = True
        max_prefills = self._suspects.max_prefills()
        plan = plan_step(self.ranked, max_tokens, budget, max_prefills)
        if self._reclaim_blocks(plan):
            # The victim must not compute, and no sequence may start on blocks that the victim was about to fill.
            plan = plan_step(self.ranked, max_tokens, budget, max_prefills)
        if self.missing_blocks:
            # Another sequence may need the blocks that drafts would fill.
            plan.drafts.clear()
        self._urgent |= plan.needs_blocks_soon
        if self._evicting:
            self._plan_evictions(plan)
        return plan

    def _plan_evictions(self, plan: StepPlan) -> None:
        for sequence, count in plan.compute:
            eviction = sequence.eviction
            if eviction is None:
                continue
            if eviction.relocating:
                plan.relocating.append(sequence)
            if eviction.window_unsent:
                plan.resizing.append(sequence)
            planned = sequence.planned + count
            if eviction.policy.looks(planned - sequence.evicted, planned, eviction.prompt):
                plan.looking.append(sequence)

    def _reclaim_blocks(self, plan: StepPlan) -> bool:
        """Trims sequences with spare blocks and, if that was not enough, preempts one; returns whether it preempted."""
        for sequence in plan.out_of_blocks:
            self.cache_update.starving[sequence.handle] = sequence.computed
        if not plan.out_of_blocks:
            self._trimmed_last = False
        if not plan.out_of_blocks or not self.missing_blocks or self._pending_reclaims or self.copies.will_free_blocks:
            return False
        spare = [] if self._trimmed_last else trimmable(self.ranked, plan.out_of_blocks)
        self._trimmed_last = bool(spare)
        for sequence in spare:
            self.cache_update.trimmed[sequence.handle] = sequence.trim()
            self._pending_reclaims.add(sequence.handle)
        victim = None if spare else choose_victim(self.ranked)
        if victim is None:
            return False
        self._pending_reclaims.add(victim.handle)
        self.updates.preempted.append(victim.request.arrival)
        self.leave(victim, LeaveReason.PREEMPTED)
        return True

    def apply_result(self, step: InFlightStep, result: execution_pb2.StepResult, now: float = 0.0) -> None:
        """Applies the answer to a step, at `now` in seconds of the monotonic clock.

        Raises ExecutorLostError when the answer does not match the step.
        """
        self._answered = step.number
        self.updates.steps += 1
        if self.copies.waiting:
            self._commit_copies(result)
        if self._evicting:
            self._commit_evictions(step, result)
        sampling = {}
        for sequence in step.decodes:
            # The step was sent before the stop of the sequence was seen: a stopped sequence has no result.
            if not sequence.stopped:
                sequence.computed += 1
                sampling[sequence.handle] = sequence
        for sequence, count, samples in step.prefills:
            sequence.computed += count
            if samples:
                sampling[sequence.handle] = sequence
        for sequence, eviction in self._evicting.values():
            self.updates.most_kept[sequence.request.arrival] = eviction.keep(sequence.computed)
        accepted = self._commit_drafts(step, result)
        if (
            result.step != step.number
            or set(result.sequences) != sampling.keys()
            or len(result.sequences) != len(sampling) + accepted
        ):
            raise ExecutorLostError(f"step {step.number} was answered with other sequences than it sampled")
        for scored in result.prompt_logprobs:
            if (found := self._by_handle.get(scored.sequence)) is not None:
                self.updates.prompt_logprobs.append((found.request.arrival, scored.logprobs))
        self._apply_tokens(sampling, result, now)
        self._detach_leaving()

    def _commit_drafts(self, step: InFlightStep, result: execution_pb2.StepResult) -> int:
        """Corrects the lengths of sequences by the drafts that were not accepted; returns how many were accepted.

        Stores how many drafts each sequence wants next.
        """
        accepted = 0
        if step.drafts:
            tokens = Counter(result.sequences)
            for sequence, allowed in step.drafts:
                if sequence.stopped:
                    continue
                more = min(max(tokens[sequence.handle] - 1, 0), allowed)
                accepted += more
                sequence.computed += more
                sequence.planned -= allowed - more
                sequence.known -= allowed - more
            self.updates.drafted += result.num_drafts
            self.updates.accepted += accepted
        if result.draft_sequences or self._has_drafts:
            self._has_drafts = len(result.draft_sequences) > 0
            wanted = dict(zip(result.draft_sequences, result.draft_tokens, strict=True))
            for sequence, _, samples in step.compute:
                if samples and sequence.eviction is None:
                    sequence.drafts = wanted.get(sequence.handle, 0)
        return accepted

    def _apply_tokens(self, sampling: dict[int, Sequence], result: execution_pb2.StepResult, now: float) -> None:
        logprobs = {entry.index: entry for entry in result.logprobs}
        outputs, failed = self.updates.outputs, set(result.failed_sequences)
        columns = zip(result.sequences, result.token_ids, result.stopped, strict=True)
        for index, (handle, token_id, stopped) in enumerate(columns):
            sequence = sampling[handle]
            sequence.token_ids.append(token_id)
            finished = stopped or len(sequence.token_ids) >= sequence.limit
            first = sequence.first_token_at > now
            if sequence.leave_reason is not LeaveReason.CANCELLED:
                meta = None
                if first or finished or index in logprobs:
                    meta = TokenMeta(handle, stopped, finished, logprobs.get(index))
                if stopped and handle in failed:
                    # The token is no part of the output.
                    self.updates.failed_forms.append(sequence.request.arrival)
                else:
                    outputs.append((sequence.request.arrival, token_id, meta))
            if first:
                sequence.first_token_at = now
                # Its prompt can be shared from now on.
                self._urgent = True
            if finished:
                sequence.stopped = stopped
                self.leave(sequence, LeaveReason.FINISHED)

    def _commit_copies(self, result: execution_pb2.StepResult) -> None:
        for ticket in result.failed_tickets:
            copy, sequence = self.copies.waiting.get(ticket, (None, None))
            if copy is not None and sequence is not None and sequence.leave_reason is None:
                sequence.retry_tier = Tier(copy.source_tier - 1)
                self.leave(sequence, LeaveReason.RESTARTED)
        for ticket in dict.fromkeys((*result.copied_tickets, *result.failed_tickets)):
            sequence = self.copies.end(ticket)
            if sequence is None:
                continue
            if sequence.leave_reason is None:
                host, disk = sequence.onloaded_tokens(Tier.HOST), sequence.onloaded_tokens(Tier.DISK)
                self.updates.onloaded.append((sequence.request.arrival, host, disk))
            else:
                # Its blocks are free now: the next sync says how many are still missing.
                self.missing_blocks = 0

    def restart_late(self, now: float) -> None:
        """Restarts sequences whose onloads are late, at `now` in seconds of the monotonic clock.

        The next attempt uses cached blocks of the device only and computes the rest.
        """
        for sequence in self.copies.take_late(now):
            if sequence.leave_reason is None:
                self.updates.late.append(sequence.request.arrival)
                sequence.retry_tier = Tier.DEVICE
                self.leave(sequence, LeaveReason.RESTARTED)

    def _commit_evictions(self, step: InFlightStep, result: execution_pb2.StepResult) -> None:
        for sequence, computed in step.relocated:
            # A sequence that has already stopped computes nothing more and has not moved.
            if not sequence.stopped:
                self.cache_update.relocated[sequence.handle] = computed
        columns = zip(result.evicted_sequences, result.evicted_tokens, result.kept_masses, strict=True)
        for handle, tokens, mass in columns:
            if handle in self._evicting:
                sequence, eviction = self._evicting[handle]
                eviction.evict(tokens, sequence.computed)
                self.updates.evicted.append((sequence.request.arrival, tokens, mass))
        for sequence, tokens in step.shortened:
            if sequence.leave_reason is None:
                self.cache_update.windows[sequence.handle] = tokens
        for handle, tokens in zip(result.window_sequences, result.window_tokens, strict=True):
            if handle in self._evicting and self._evicting[handle][1].wants_window(tokens):
                self.cache_update.windows[handle] = tokens

    def leave(self, sequence: Sequence, reason: LeaveReason) -> None:
        """Removes a sequence: at once, or once no step in flight touches its blocks."""
        if sequence.leave_reason is not None:
            if sequence.leave_reason.is_admitted_again and not reason.is_admitted_again:
                sequence.leave_reason = reason
            return
        sequence.leave_reason = reason
        if sequence.started:
            self.removed.append(sequence.handle)
        if sequence.last_step <= self._answered:
            self._detach(sequence)
        else:
            self._leaving.append(sequence)

    def restart_all(
        self, *, executor_lost: bool, in_flight: Iterable[InFlightStep] = (), is_planned: bool = False
    ) -> None:
        """Restarts every live sequence from its token ids.

        executor_lost: otherwise, the cache manager has forgotten the sequences. is_planned: the executor's end was
        planned, so no sequence is to blame. in_flight: steps without an answer. The executor may or may not have
        received them: the cache manager ignores the cancellation of a confirmed ticket.
        """
        steps = list(in_flight)
        sent = (copy.ticket for step in steps for copy in step.copies)
        self.cache_update.cancelled_tickets += [*sent, *self.copies.clear()]
        # Steps are answered in order: the executor was lost during the first of them.
        if executor_lost and steps and not is_planned:
            blame(steps[0])
        for sequence in list(self.ranked):
            sequence.last_step = 0
            self.leave(sequence, LeaveReason.RESTARTED)
        self._detach_leaving()
        assert not self.ranked
        if executor_lost:
            self.removed.clear()
            self._answered = self._reported_step = 0
        else:
            self._released.clear()
        self._pending_reclaims.clear()
        self.missing_blocks = 0

    def _detach_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence.last_step <= self._answered:
                self._detach(sequence)
            else:
                self._leaving.append(sequence)

    def _detach(self, sequence: Sequence) -> None:
        assert sequence.leave_reason is not None
        if sequence.handle not in self._by_handle:
            return
        del self._by_handle[sequence.handle]
        del self._by_arrival[sequence.request.arrival]
        self._evicting.pop(sequence.handle, None)
        self._suspects.discard(sequence)
        self.ranked.remove(sequence)
        reliable = sequence.shareable_tokens
        self._released[sequence.handle] = reliable
        self._report_progress(sequence)
        self.cache_update.released.append(sequence.handle)
        self.cache_update.cancelled_tickets += self.copies.cancel(sequence)
        if sequence.leave_reason.is_admitted_again:
            attempt = next_attempt(sequence)
            if attempt is None:
                self.updates.given_up.append(sequence.request.arrival)
            else:
                self.updates.retried.append(attempt)
        for other in self._followers.pop(sequence.handle, ()):
            if not other.started and other.cached_tokens > reliable:
                self.leave(other, LeaveReason.RESTARTED)
