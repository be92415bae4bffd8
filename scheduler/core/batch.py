"""The live sequences and every change of their state. Owned by the step loop's thread."""

import bisect
from collections.abc import Iterable

from protos.execution.v1 import execution_pb2
from scheduler.bridge import Detail, Report, SyncAnswer
from scheduler.cache.tier_costs import Tier
from scheduler.core.onloading import Copies
from scheduler.core.planner import Plan, choose_victim, plan_step, trimmable
from scheduler.core.prefill_budget import Pace
from scheduler.core.step_message import Flight
from scheduler.errors import ExecutorLostError
from scheduler.sequence import Exit, Sequence

# Progress that nobody waits for is told once in so many steps: the cache manager gives capacity ahead, and a call
# per step would cost more than all else that it does.
GATHER_STEPS = 8
# So often in a row the executor may be lost over one request before that is given up: twice in company, and then alone.
# A death that has nothing to do with it does not strike it so often; one that has costs everybody what the device held.
MAX_FAILURES = 3


class RunningSet:
    """All sequences that hold blocks, in order of rank, started or not.

    A sequence that leaves stays until no step in flight can touch its blocks; only then it is reported as released.
    """

    def __init__(self) -> None:
        self.report = Report()
        # Handles that the next step removes from the executor.
        self.removed: list[int] = []
        # Copies that the next step brings to the executor, and those that sequences wait for.
        self.copies = Copies()
        self.blocks_short = 0
        self._by_handle: dict[int, Sequence] = {}
        self._by_arrival: dict[int, Sequence] = {}
        # Those that have a policy.
        self._evicting: dict[int, Sequence] = {}
        # Those that the executor was lost over.
        self._suspects: dict[int, Sequence] = {}
        self._ranked: list[Sequence] = []
        self._answered = 0
        # Tokens that released sequences leave to others, while the cache manager does not know them to be released.
        self._released: dict[int, int] = {}
        # Handles that made room and whose release or trim is not answered: wait before asking for more.
        self._relief: set[int] = set()
        self._trimmed_last = False
        # Sequences on their way out that a step in flight may touch.
        self._leaving: list[Sequence] = []
        # By the handle whose blocks they wait for.
        self._followers: dict[int, list[Sequence]] = {}
        # The step up to which everybody's progress was told, and whether it is wanted before its time.
        self._told_step = 0
        self._pressing = False

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def ranked(self) -> list[Sequence]:
        """Live sequences in order of rank."""
        return self._ranked

    def take_report(self, *, everything: bool = True) -> Report:
        """The report since the last call, with everybody's progress or, where that may wait, without it."""
        report = self.report
        report.step = self._answered
        pressing = everything or (
            self._pressing or report.released or report.trimmed or report.starving or report.evicting or report.moved
        )
        if pressing or self._answered >= self._told_step + GATHER_STEPS:
            self._told_step, self._pressing = self._answered, False
            for sequence in self._ranked:
                self._tell(sequence)
        self.report = Report()
        return report

    def _tell(self, sequence: Sequence) -> None:
        if sequence.computed > sequence.told:
            self.report.progress[sequence.handle] = sequence.progress()

    def admit(self, sequence: Sequence, *, valid: bool = True) -> None:
        """Takes over an admitted sequence; one that is not valid goes back to be admitted again."""
        self._by_handle[sequence.handle] = sequence
        self._by_arrival[sequence.request.arrival] = sequence
        if sequence.eviction is not None:
            self._evicting[sequence.handle] = sequence
        if sequence.is_suspect:
            self._suspects[sequence.handle] = sequence
        bisect.insort(self._ranked, sequence, key=lambda item: item.request.rank)
        if valid:
            self.copies.add(sequence)
        else:
            self.report.cancelled_tickets.extend(copy.ticket for copy in sequence.copies)
        promised = sequence.cached_tokens
        writer = sequence.wait_for
        if writer in self._by_handle:
            self._followers.setdefault(writer, []).append(sequence)
        if not valid or (writer not in self._by_handle and self._released.get(writer, promised) < promised):
            self.leave(sequence, Exit.RESTARTED)

    def cancel(self, arrival: int) -> None:
        """Drops a request; unknown ones have ended."""
        sequence = self._by_arrival.get(arrival)
        if sequence is not None:
            self.leave(sequence, Exit.CANCELLED)

    def apply(self, answer: SyncAnswer, *, valid: bool = True) -> None:
        """Takes what a sync brought. Copies of one that is not valid are about memory that is gone."""
        if valid:
            self.copies.unsent += answer.copies
        else:
            self.report.cancelled_tickets.extend(copy.ticket for copy in answer.copies)
        for handle in answer.released:
            self._released.pop(handle, None)
        for handle in answer.trimmed:
            if handle in self._by_handle:
                self._by_handle[handle].trim_unanswered = False
        self._relief.difference_update(answer.released, answer.trimmed)
        self._apply_evictions(answer)
        for handle, group, slots in answer.extensions:
            sequence = self._by_handle.get(handle)
            # A trim on its way cuts off what was given before it.
            if sequence is not None and not sequence.trim_unanswered:
                sequence.extend(group, slots)
        for handle in answer.void_handles:
            if handle in self._by_handle:
                self.leave(self._by_handle[handle], Exit.RESTARTED)
        self.blocks_short = answer.blocks_short

    def _apply_evictions(self, answer: SyncAnswer) -> None:
        for handle in answer.moved:
            if handle in self._evicting:
                self._evicting[handle].own_blocks_settled()
        for handle, slots in answer.own:
            if handle in self._evicting:
                self._evicting[handle].own_blocks_given(slots)

    @property
    def evicts(self) -> bool:
        """Whether any sequence has a policy of eviction."""
        return bool(self._evicting)

    def plan(self, budget: int, pace: Pace | None = None) -> Plan:
        """The next step, of at most `budget` tokens; makes room for sequences that cannot go on."""
        for sequence in self._evicting.values():
            if sequence.exit is None and sequence.make_room():
                self.report.evicting[sequence.handle] = sequence.asks_first()
        self._suspects = {handle: one for handle, one in self._suspects.items() if one.is_suspect}
        # One at a time, it shows which one it is.
        most_prompts = 1 if self._suspects else None
        plan = plan_step(self._ranked, budget, pace, most_prompts)
        if self._relieve(plan):
            # The victim must not compute, nor anybody start on blocks that it was about to fill.
            plan = plan_step(self._ranked, budget, pace, most_prompts)
        self._pressing |= plan.tight
        return plan

    def _relieve(self, plan: Plan) -> bool:
        """Trims sequences that hold more than they need, and when that did not do, preempts one: then it is true."""
        for sequence in plan.stalled:
            self.report.starving[sequence.handle] = sequence.computed
        if not plan.stalled:
            self._trimmed_last = False
        if not plan.stalled or not self.blocks_short or self._relief or self.copies.free_blocks_soon:
            return False
        spare = [] if self._trimmed_last else trimmable(self._ranked, plan.stalled)
        self._trimmed_last = bool(spare)
        for sequence in spare:
            self.report.trimmed[sequence.handle] = sequence.trim()
            self._relief.add(sequence.handle)
        victim = None if spare else choose_victim(self._ranked)
        if victim is None:
            return False
        self._relief.add(victim.handle)
        self.report.preempted.append(victim.request.arrival)
        self.leave(victim, Exit.PREEMPTED)
        return True

    def commit(self, flight: Flight, result: execution_pb2.StepResult, now: float = 0.0) -> None:
        """Takes the answer to a step, at `now` on the monotonic clock.

        Raises ExecutorLostError when it is not the answer to what was asked.
        """
        self._answered = flight.step
        self.report.steps += 1
        if self.copies.waiting:
            self._commit_copies(result)
        self._commit_evictions(flight, result)
        waiting = {}
        for sequence in flight.decoding:
            # One that has stopped stays silent: the step was sent before the stop was seen.
            if not sequence.stopped:
                sequence.computed += 1
                waiting[sequence.handle] = sequence
        for sequence, count, samples in flight.prompts:
            sequence.computed += count
            if samples:
                waiting[sequence.handle] = sequence
        self._note_kept()
        if result.step != flight.step or set(result.sequences) != waiting.keys():
            raise ExecutorLostError(f"step {flight.step} was answered with other sequences than it sampled")
        logprobs = {one.index: one for one in result.logprobs}
        outputs = self.report.outputs
        columns = zip(result.sequences, result.token_ids, result.stopped, strict=True)
        for index, (handle, token_id, stopped) in enumerate(columns):
            sequence = waiting[handle]
            sequence.token_ids.append(token_id)
            finished = stopped or len(sequence.token_ids) >= sequence.limit
            first = sequence.streams_since > now
            if sequence.exit is not Exit.CANCELLED:
                one = logprobs.get(index)
                tells = first or finished or one is not None
                detail = Detail(handle, stopped, finished, one) if tells else None
                outputs.append((sequence.request.arrival, token_id, detail))
            if first:
                sequence.streams_since = now
                # Its prompt can be shared from now on.
                self._pressing = True
            if finished:
                sequence.stopped = stopped
                self.leave(sequence, Exit.FINISHED)
        self._detach_leaving()

    def _commit_copies(self, result: execution_pb2.StepResult) -> None:
        for ticket in result.failed_tickets:
            copy, sequence = self.copies.waiting.get(ticket, (None, None))
            if copy is not None and sequence is not None and sequence.exit is None:
                sequence.retry_tier = Tier(copy.source_tier - 1)
                self.leave(sequence, Exit.RESTARTED)
        for ticket in dict.fromkeys((*result.copied_tickets, *result.failed_tickets)):
            sequence = self.copies.end(ticket)
            if sequence is None:
                continue
            if sequence.exit is None:
                host, disk = sequence.onboarded_tokens(Tier.HOST), sequence.onboarded_tokens(Tier.DISK)
                self.report.onboarded.append((sequence.request.arrival, host, disk))
            else:
                # Its blocks are free now: how many are short is the next sync's to say.
                self.blocks_short = 0

    def restart_late(self, now: float) -> None:
        """Gives up sequences that have waited too long for their blocks, at `now` on the monotonic clock.

        They are admitted again with what is on the device, and compute the rest.
        """
        for sequence in self.copies.late(now):
            if sequence.exit is None:
                self.report.late.append(sequence.request.arrival)
                sequence.retry_tier = Tier.DEVICE
                self.leave(sequence, Exit.RESTARTED)

    def _commit_evictions(self, flight: Flight, result: execution_pb2.StepResult) -> None:
        for moved, computed in flight.moved:
            # One that has stopped before stays where it was: it computes nothing more.
            if not moved.stopped:
                self.report.moved[moved.handle] = computed
        columns = zip(result.evicted_sequences, result.evicted_tokens, result.kept_masses, strict=True)
        for handle, tokens, mass in columns:
            sequence = self._evicting.get(handle)
            if sequence is not None and sequence.eviction is not None:
                sequence.eviction.evict(tokens, sequence.computed)
                self.report.evicted.append((sequence.request.arrival, tokens, mass))

    def _note_kept(self) -> None:
        for sequence in self._evicting.values():
            assert sequence.eviction is not None
            self.report.most_kept[sequence.request.arrival] = sequence.eviction.keep(sequence.computed)

    def leave(self, sequence: Sequence, reason: Exit) -> None:
        """Begins the exit of a sequence; it ends at once when no step in flight touches it."""
        if sequence.exit is not None:
            if sequence.exit.comes_back and not reason.comes_back:
                sequence.exit = reason
            return
        sequence.exit = reason
        if sequence.started:
            self.removed.append(sequence.handle)
        if sequence.last_step <= self._answered:
            self._detach(sequence)
        else:
            self._leaving.append(sequence)

    def restart_all(self, *, executor_lost: bool, in_flight: Iterable[Flight] = ()) -> None:
        """Gives every sequence up, to be admitted again from its ids.

        in_flight: steps that nobody will answer. Whether they have arrived is not known: the cache manager ignores
        tickets that are confirmed.
        """
        flights = list(in_flight)
        sent = (copy.ticket for flight in flights for copy in flight.copies)
        self.report.cancelled_tickets += [*sent, *self.copies.clear()]
        # Steps are answered in order: it was lost over the first one.
        lost_over = flights[0].compute if executor_lost and flights else ()
        accused = [sequence for sequence, _, _ in lost_over if not sequence.has_gained]
        for sequence in accused:
            # One that has failed before counts only what it alone can have done.
            if not sequence.is_suspect or len(accused) == 1:
                sequence.failures += 1
        for sequence in list(self._ranked):
            sequence.last_step = 0
            self.leave(sequence, Exit.RESTARTED)
        self._detach_leaving()
        assert not self._ranked
        if executor_lost:
            self.removed.clear()
            self._answered = self._told_step = 0
        else:
            self._released.clear()
        self._relief.clear()
        self.blocks_short = 0

    def _detach_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence.last_step <= self._answered:
                self._detach(sequence)
            else:
                self._leaving.append(sequence)

    def _detach(self, sequence: Sequence) -> None:
        assert sequence.exit is not None
        if sequence.handle not in self._by_handle:
            return
        del self._by_handle[sequence.handle]
        del self._by_arrival[sequence.request.arrival]
        self._evicting.pop(sequence.handle, None)
        self._suspects.pop(sequence.handle, None)
        self._ranked.remove(sequence)
        reliable = sequence.reliable
        self._released[sequence.handle] = reliable
        self._tell(sequence)
        self.report.released.append(sequence.handle)
        self.report.cancelled_tickets += self.copies.call_off(sequence)
        if sequence.exit.comes_back:
            candidate = sequence.again()
            if candidate.failures < MAX_FAILURES:
                self.report.again.append(candidate)
            else:
                self.report.given_up.append(sequence.request.arrival)
        for other in self._followers.pop(sequence.handle, ()):
            if not other.started and other.cached_tokens > reliable:
                self.leave(other, Exit.RESTARTED)
