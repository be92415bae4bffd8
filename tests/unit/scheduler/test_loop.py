"""The step loop on its own."""

import threading
from collections.abc import Callable
from math import inf

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from protos.execution.v1 import execution_pb2 as pb
from scheduler.bridge import Admitted, CommandQueue, RequestUpdates, SessionEnded, Stop
from scheduler.core.loop import StepLoop
from scheduler.core.prefill_budget import PrefillBudget
from scheduler.errors import ExecutorLostError
from scheduler.metrics import StepTimes
from scheduler.request import AdapterChange
from scheduler.sequence import Sequence
from tests.support.scheduler.copies import down
from tests.support.scheduler.sequences import BLOCK, Updates, sequence, synced


def step_loop(executor: object, commands: CommandQueue, updates: Updates) -> StepLoop:
    times = StepTimes(CollectorRegistry())
    return StepLoop(executor, commands, updates, times, max_batched_tokens=64, budget=PrefillBudget())  # type: ignore[arg-type]


class OneStep:
    """An executor whose first answer ends the loop."""

    max_batched_tokens = 0

    def __init__(self, commands: CommandQueue) -> None:
        self.steps: list[pb.Step] = []
        self.adapter_changes: list[AdapterChange] = []
        self._commands = commands
        self._opened = False

    def open(self) -> None:
        pass

    def send(self, step: pb.Step) -> None:
        self.steps.append(step)

    def receive(self, seconds: float = 0.0) -> pb.StreamStepsResponse | None:
        if not seconds:
            return None
        if not self._opened:
            self._opened = True
            return pb.StreamStepsResponse(opened=pb.SessionOpened(max_batched_tokens=self.max_batched_tokens))
        return pb.StreamStepsResponse(result=self.answer())

    def answer(self) -> pb.StepResult:
        self._commands.put(Stop())
        return pb.StepResult(step=self.steps[-1].step)

    def close(self) -> None:
        pass


def test_only_copies_of_the_open_session_are_sent() -> None:
    commands = CommandQueue()
    executor = OneStep(commands)
    updates = Updates()
    commands.put(synced(down(30), session=1))
    for ticket, session in ((31, -1), (32, 0), (33, 2)):
        commands.put(synced(down(ticket), session=session))
    step_loop(executor, commands, updates).run()
    assert [list(step.copy_tickets) for step in executor.steps] == [[30]]
    assert [item.cancelled_tickets for item in updates.cache if item.cancelled_tickets] == [[31, 32, 33]]


@pytest.mark.parametrize("session", [-1, 0, 2])
def test_blocks_of_another_session_are_not_used(session: int) -> None:
    commands, updates = CommandQueue(), Updates()
    executor = OneStep(commands)
    # The copy asks for a step.
    commands.put(synced(down(30), session=1))
    commands.put(Admitted(sequence(1, 3), session=session))
    step_loop(executor, commands, updates).run()
    assert [len(step.new_sequences) for step in executor.steps] == [0]
    assert [attempt.request.arrival for item in updates.requests for attempt in item.retried] == [1]


class Leaving(OneStep):
    """An executor whose first session ends as soon as it is open; its second ends the loop."""

    def __init__(self, commands: CommandQueue) -> None:
        super().__init__(commands)
        self.sessions = 0

    def open(self) -> None:
        self.sessions += 1
        self._opened = False
        self._commands.put(SessionEnded() if self.sessions == 1 else Stop())

    def receive(self, seconds: float = 0.0) -> pb.StreamStepsResponse | None:
        if self._opened:
            raise ExecutorLostError("the executor ended the session")
        return super().receive(seconds)


def test_an_idle_loop_notices_the_end_of_a_session_that_it_reads_between_its_waits() -> None:
    commands = CommandQueue()
    executor = Leaving(commands)
    # Ends a loop that sleeps for ever.
    alarm = threading.Timer(10, commands.put, [Stop()])
    alarm.start()
    step_loop(executor, commands, Updates()).run()
    alarm.cancel()
    assert executor.sessions == 2


class Timed(OneStep):
    """An executor that reports how long its steps took, and counts its waiting steps at each answer."""

    def __init__(
        self, commands: CommandQueue, steps: int, seconds: Callable[[int, int], float], prompt: int = 0
    ) -> None:
        """seconds: what a step takes, by its number from 0 and its prompt tokens.

        One sequence decodes from the beginning; with the tenth answer another one comes with so long a prompt.
        """
        self.had: list[int] = []
        # Prompt tokens of each answered step, but for the first one's.
        self.tokens: list[int] = []
        super().__init__(commands)
        self._num_steps, self._seconds, self._prompt = steps, seconds, prompt

    def open(self) -> None:
        self._commands.put(Admitted(sequence(1, 3, max_tokens=100, blocks=60), session=1))

    def answer(self) -> pb.StepResult:
        self.had.append(len(self.steps))
        step = self.steps.pop(0)
        self.tokens.append(sum(tokens for tokens in step.chunk_tokens if step.step))
        if len(self.had) == 10 and self._prompt:
            self._commands.put(Admitted(sequence(2, self._prompt, blocks=self._prompt, arrived_at=inf), session=1))
        if len(self.had) == self._num_steps:
            self._commands.put(Stop())
        result = pb.StepResult(step=step.step, sequences=[1], token_ids=[7], stopped=[False], num_tokens=1)
        result.compute_time.FromNanoseconds(int(self._seconds(step.step, self.tokens[-1]) * 1e9))
        return result


def run(commands: CommandQueue, executor: Timed) -> list[RequestUpdates]:
    updates = Updates()
    step_loop(executor, commands, updates).run()
    return updates.requests


def test_more_short_steps_are_sent_ahead() -> None:
    commands = CommandQueue()
    executor = Timed(commands, 30, lambda step, _: (0.001, 0.02, 0.01)[min(step // 10, 2)])
    batches = run(commands, executor)
    # The first two are sent before it is known how long they take.
    assert executor.had[:2] == [2, 2]
    # What they took changes the number when it is seen, and three are asked.
    assert executor.had[6:10] == [4] * 4
    assert executor.had[16:20] == [2] * 4
    assert executor.had[26:30] == [3] * 4
    assert sum(len(batch.outputs) for batch in batches) == len(executor.had)


@pytest.mark.parametrize(("token_seconds", "steps"), [(1e-6, 4), (0.004, 3), (0.02, 2)])
def test_the_time_of_prompts_bounds_the_steps_ahead(token_seconds: float, steps: int) -> None:
    commands = CommandQueue()
    executor = Timed(commands, 40, lambda _, tokens: 0.001 + token_seconds * tokens, prompt=3_000)
    run(commands, executor)
    first = next(index for index, tokens in enumerate(executor.tokens) if tokens)
    assert executor.had[first - 1] == 4
    # Until the first step with some has been answered nothing is known of them, and its followers are under way.
    known = list(zip(executor.had, executor.tokens, strict=True))[first + 5 : 40]
    assert [had for had, tokens in known if tokens]
    assert {had for had, tokens in known if tokens} == {steps}


def test_a_single_step_is_sent_ahead_while_blocks_are_missing() -> None:
    commands = CommandQueue()
    executor = Timed(commands, 20, lambda step, _: 0.001)
    commands.put(synced(missing_blocks=1))
    run(commands, executor)
    assert executor.had[:20] == [2] * 20


def test_the_dump_of_a_failed_loop_has_no_prompts() -> None:
    commands = CommandQueue()
    executor = Timed(commands, 30, lambda step, _: 1 / 0 if step == 3 else 0.001)
    steps = step_loop(executor, commands, Updates())
    with pytest.raises(ZeroDivisionError):
        steps.run()
    state = steps.dump()
    assert state["in_flight"][0] == (3, [(1, 1, True)])
    [sequence] = state["sequences"]
    assert (sequence["handle"], sequence["computed"], sequence["tokens"]) == (1, 5, 6)
    # Numbers and states alone: no ids, no texts.
    values = [value for value in sequence.values() if not isinstance(value, int | float)]
    assert values == [None, sequence["blocks"]]


class Small(OneStep):
    """An executor with memory for a step of `limit` tokens. Each session computes what is left of a prompt.

    The loop ends with the answer to a step, or when the request is given up.
    """

    def __init__(self, commands: CommandQueue, updates: Updates, limit: int) -> None:
        super().__init__(commands)
        self._updates, self._limit = updates, limit
        self.attempt = sequence(1, 40, blocks=40).attempt
        # Tokens of the first step of each session.
        self.tokens: list[int] = []

    def open(self) -> None:
        self._opened = False
        self.steps.clear()
        if any(item.given_up for item in self._updates.requests):
            self._commands.put(Stop())
            return
        self.tokens.append(0)
        for item in self._updates.requests:
            self.attempt = item.retried[-1] if item.retried else self.attempt
        admitted = Sequence(self.attempt, 1, tables=[list(range(40))], block_size=BLOCK, cached_tokens=0)
        self._commands.put(Admitted(admitted, session=len(self.tokens)))

    def answer(self) -> pb.StepResult:
        step = self.steps.pop(0)
        self.tokens[-1] = self.tokens[-1] or sum(step.chunk_tokens)
        if sum(step.chunk_tokens) > self._limit:
            raise ExecutorLostError("there was no memory", is_out_of_memory=True)
        self._commands.put(Stop())
        return pb.StepResult(step=step.step, num_tokens=sum(step.chunk_tokens))


def test_steps_without_memory_become_shorter_before_a_request_is_to_blame() -> None:
    commands, updates = CommandQueue(), Updates()
    executor = Small(commands, updates, limit=10)
    loop = step_loop(executor, commands, updates)
    with capture_logs() as logs:
        loop.run()
    assert executor.tokens == [40, 20, 10]
    assert executor.attempt.failures == 0
    said = [(line["tokens"], line["max_tokens"]) for line in logs if "no memory" in line["event"]]
    assert said == [(40, 20), (20, 10)]


def test_a_request_whose_last_token_finds_no_memory_is_given_up() -> None:
    commands, updates = CommandQueue(), Updates()
    executor = Small(commands, updates, limit=0)
    step_loop(executor, commands, updates).run()
    assert executor.tokens == [40, 20, 10, 5, 2, 1, 1, 1]
    assert [arrival for item in updates.requests for arrival in item.given_up] == [1]


class Announcing(Small):
    """Announces a bound of its steps in its first session, and another bound in later sessions."""

    def __init__(self, commands: CommandQueue, updates: Updates, limit: int, bounds: tuple[int, int]) -> None:
        super().__init__(commands, updates, limit)
        self._bounds = bounds

    def open(self) -> None:
        self.max_batched_tokens = self._bounds[bool(self.tokens)]
        super().open()


# By what an executor with memory for 16 tokens announces in its sessions: tokens of its steps.
BOUNDS = {(16, 16): [16], (100, 0): [40, 20, 10], (30, 15): [30, 15], (30, 20): [30, 15], (1, 1): [1]}


@pytest.mark.parametrize(("bounds", "expected"), BOUNDS.items())
def test_steps_are_no_longer_than_the_executor_announces(bounds: tuple[int, int], expected: list[int]) -> None:
    commands, updates = CommandQueue(), Updates()
    executor = Announcing(commands, updates, 16, bounds)
    with capture_logs() as logs:
        step_loop(executor, commands, updates).run()
    assert executor.tokens == expected
    assert executor.attempt.failures == 0
    said = [line for line in logs if line["event"].startswith("the executor keeps memory for fewer tokens")]
    assert bool(said) == (bounds[0] < 64)
