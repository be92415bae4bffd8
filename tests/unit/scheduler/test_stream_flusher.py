"""When streams hear of their tokens."""

import asyncio
import time
from array import array

import pytest

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from scheduler.bridge import TokenMeta
from scheduler.errors import DrainingError
from scheduler.frontend import output
from scheduler.frontend.model_info import ModelInfo
from scheduler.frontend.output import Stream, StreamFlusher
from scheduler.request import Request
from tests.support.patience import patience
from tests.support.scheduler.tokenizers import byte_level_tokenizer

LETTER = 5


@pytest.fixture
def model() -> ModelInfo:
    described = execution_pb2.GetModelResponse(tokenizer_json=byte_level_tokenizer().to_str().encode())
    return ModelInfo(described, execution_pb2.GetExecutorResponse(block_size=16))


def turns(model: ModelInfo, count: int) -> tuple[StreamFlusher, list[Stream]]:
    """Streams, and a flusher that notifies all of them."""
    requests = [Request(f"r{i}", array("I", [1, 2]), 100, execution_pb2.SamplingParams(), i, 0.0) for i in range(count)]
    taking, order = [Stream([request], model) for request in requests], StreamFlusher()
    for stream in taking:
        order.add(stream.generations[0])
    return order, taking


def feed(taking: list[Stream], now: float) -> None:
    for stream in taking:
        stream.generations[0].feed(LETTER, now)


async def notified(taking: list[Stream]) -> list[int]:
    """Indexes of the notified streams; takes their tokens."""
    result = []
    for index, stream in enumerate(taking):
        try:
            async with asyncio.timeout(0):
                await stream.next()
        except TimeoutError:
            continue
        result.append(index)
    return result


async def test_many_streams_are_notified_a_few_at_a_time_and_all_in_turn(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(output, "MESSAGE_SECONDS", 20)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    order, taking = turns(model, 6)
    heard: list[list[int]] = []
    feed(taking, 0.0)
    order.flush()
    assert await notified(taking) == list(range(6)), "after a long silence there is time for all"
    for step in range(1, 8):
        now += 45
        feed(taking, float(step))
        order.flush()
        heard.append(await notified(taking))
        assert len(heard[-1]) == 2
    # The turns go round.
    in_turn = [index for turn in heard for index in turn]
    assert in_turn == [place % 6 for place in range(len(in_turn))]


async def test_a_removed_stream_is_not_notified(model: ModelInfo) -> None:
    order, taking = turns(model, 3)
    order.remove(taking[1].generations[0])
    feed(taking, 0.0)
    order.flush()
    assert await notified(taking) == [0, 2]


async def test_a_waiting_stream_is_notified_also_when_no_tokens_follow(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MESSAGE_SECONDS", 0.02)
    order, taking = turns(model, 4)
    with monkeypatch.context() as patch:
        now = time.monotonic()
        patch.setattr(time, "monotonic", lambda: now)
        order.flush()
        feed(taking, 0.0)
        order.flush()
        assert await notified(taking) == []
    async with asyncio.timeout(patience(10)):
        await asyncio.gather(*[stream.next() for stream in taking])


async def test_the_time_of_writing_brings_no_turn_forward(model: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(output, "MESSAGE_SECONDS", 0.1)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    order, taking = turns(model, 4)
    written: list[Stream] = []

    async def write(stream: Stream) -> None:
        nonlocal now
        while await stream.next():
            now += 0.11
            written.append(stream)

    async def work() -> None:
        nonlocal now
        while True:
            now += 0.11
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        writers = [group.create_task(write(stream)) for stream in taking]
        await asyncio.sleep(0)
        feed(taking, 0.0)
        order.flush()
        await asyncio.sleep(0)
        assert written == taking
        feed(taking, 1.0)
        order.flush()
        await asyncio.sleep(0)
        assert written == taking, "as many again would keep the loop from anything else, for ever"
        worker = group.create_task(work())
        for _ in range(8):
            await asyncio.sleep(0)
            feed(taking, 2.0)
            order.flush()
        assert len(written) > 8, "other work is no writing"
        for task in (*writers, worker):
            task.cancel()


async def test_no_stream_is_notified_out_of_turn_while_tokens_follow(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, heard = 1000.0, 0
    monkeypatch.setattr(output, "MESSAGE_SECONDS", 0.05)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    order, taking = turns(model, 2)
    order.flush()
    for step in range(20):
        feed(taking, float(step))
        order.flush()
        now += 0.02
        await asyncio.sleep(0)
        heard += len(await notified(taking))
    # A message takes as long as two and a half of these steps.
    assert 2 <= heard <= 20 / 2.5


async def test_an_output_that_has_ended_is_taken_whole_whatever_fails_later(model: ModelInfo) -> None:
    _, [slow, other] = turns(model, 2)
    for stream in (slow, other):
        stream.generations[0].feed(LETTER, 1.0)
    slow.generations[0].feed(LETTER, 1.0, TokenMeta(1, finished=True))
    slow.generations[0].notify()
    for stream in (slow, other):
        stream.generations[0].fail(DrainingError("too late"))
    [(_, chunk)] = await slow.next()
    assert (list(chunk.token_ids), chunk.finish_reason) == ([LETTER, LETTER], generation_pb2.FINISH_REASON_LENGTH)
    with pytest.raises(DrainingError):
        await other.next()
