"""The executor without a model notices a wrong block, and a cache manager that starts again keeps the right ones."""

from __future__ import annotations

import asyncio

import pytest

from bench.stub_executor import StubSettings
from executor.cache.tiers.hazards import SlotRef
from executor.step import Copy, Tier
from protos.execution.v1 import execution_pb2 as pb
from tests.chaos.stub_executor import Announcement, Worker
from tests.support.scheduler.fake_executor import FakeExecutor, continuation

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9]


def settings() -> StubSettings:
    return StubSettings(block_size=BLOCK, max_tokens=8 * BLOCK, host_cache_size=BLOCK * 131_072 * 2)


def executor() -> FakeExecutor:
    return FakeExecutor(block_size=BLOCK, max_tokens=8 * BLOCK)


def joining(number: int, handle: int, slots: list[int], computed: int = 0) -> pb.Step:
    new = pb.NewSequence(
        sequence=handle,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=computed,
        block_tables=[pb.StepBlockTable(slots=slots)],
    )
    left = len(PROMPT) - computed
    chunks = {"chunk_sequences": [handle], "chunk_tokens": [left]} if left > 1 else {}
    return pb.Step(step=number, new_sequences=[new], **chunks)


def test_a_token_depends_on_every_token_before_it() -> None:
    whole = continuation(PROMPT, 8, 10_000)
    assert continuation([*PROMPT, *whole[:3]], 5, 10_000) == whole[3:]
    for index in range(len(PROMPT)):
        other = [*PROMPT[:index], 3, *PROMPT[index + 1 :]]
        assert continuation(other, 1, 10_000) != whole[:1]


def test_a_block_of_others_is_noticed() -> None:
    stub = executor()
    stub.compute(joining(1, 1, [1, 2]))
    # The cached block is the right one, then another.
    result = stub.compute(joining(2, 2, [1, 3], computed=BLOCK))
    assert result.token_ids[-1] == continuation(PROMPT, 1, stub.vocab_size)[0]
    with pytest.raises(AssertionError, match="reads another sequence's token at 0"):
        stub.compute(joining(3, 3, [4, 5], computed=BLOCK))


async def test_a_registration_says_what_was_written_last_and_what_is_about_to_change() -> None:
    stub = executor()
    stub.confirm = lambda ticket: None
    stub.compute(joining(1, 1, [1, 2]))
    Worker(stub).transfer((Copy(7, 0, 1, 2, Tier.DEVICE, Tier.HOST), Copy(8, 0, 0, 3)))
    announcement = Announcement(settings(), stub)
    [first] = announcement.request(again=False, awaited=()).pools
    assert not first.last_write_steps
    awaited: list[SlotRef] = [(Tier.DEVICE, 0, 5), (Tier.HOST, 0, 1)]
    [pool] = announcement.request(again=True, awaited=awaited).pools
    assert list(pool.last_write_steps) == [1, 1, 1, 0, (1 << 64) - 1, 0, 0, 0]
    assert list(pool.host_generations) == [0, 7]
    await asyncio.sleep(0)
