"""Prompts become ids while other requests go on, and prompts that cannot fit are not read."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protos.execution.v1 import execution_pb2
from scheduler.errors import UnusableModelError
from scheduler.frontend.model_info import ModelInfo, TooLongError
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE, byte_level_tokenizer, space_prefix_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
LONG = "the cat sat on the mat and the dog " * 20_000


def model(tokenizer_json: str | None = None) -> ModelInfo:
    described = execution_pb2.GetModelResponse(
        model="m", chat_template=CHAT_TEMPLATE, special_tokens={"eos_token": "<eos>"},
        tokenizer_json=(tokenizer_json or byte_level_tokenizer().to_str()).encode(),
    )  # fmt: skip
    return ModelInfo(described, execution_pb2.GetExecutorResponse(block_size=16))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenizer_json": b""}, "has no tokenizer.json"),
        ({"tokenizer_json": b"{}"}, "the tokenizer of the model m cannot be read"),
        ({"tokenizer_json": b"\xff"}, "the tokenizer of the model m cannot be read"),
        ({"chat_template": "{% for one in messages %}"}, "the chat template of the model m is no template"),
        ({"chat_template": "{% break %}"}, "the chat template of the model m is no template: 'break' outside loop"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_a_sentence(fields: dict[str, Any], words: str) -> None:
    whole = {"model": "m", "tokenizer_json": byte_level_tokenizer().to_str().encode()}
    with pytest.raises(UnusableModelError, match=words):
        ModelInfo(execution_pb2.GetModelResponse(**whole | fields), execution_pb2.GetExecutorResponse(block_size=16))


async def turns(work: Callable[[], Awaitable[object]]) -> int:
    """How often another task had its turn meanwhile."""
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0.001)
            count += 1

    ticking = asyncio.create_task(tick())
    await work()
    ticking.cancel()
    return count


async def test_the_event_loop_runs_while_a_long_prompt_is_tokenized() -> None:
    served = model()
    said = [{"role": "user", "content": LONG}]
    ids = await served.encode_text(LONG)
    for work in (
        lambda: served.encode_text(LONG),
        lambda: served.encode_chat(said),
        lambda: served.encode_chat(said, [(0, len(LONG))]),
        lambda: served.decode(ids),
    ):
        # A free loop turns a thousand times per second, a blocked one once or twice in all.
        assert await turns(work) > 3


@given(TEXT)
def test_a_batch_has_the_ids_of_single_texts(text: str) -> None:
    served = model()
    assert list(asyncio.run(served.encode_text(text))) == byte_level_tokenizer().encode(text).ids


async def test_a_prompt_that_cannot_fit_is_refused_by_its_bytes() -> None:
    served = model()
    longest = max(map(len, byte_level_tokenizer().get_vocab()))
    with pytest.raises(TooLongError, match="has at least 11 tokens"):
        await served.encode_text("x" * longest * 11, 10)
    with pytest.raises(TooLongError, match=f"has {longest * 10} tokens"):
        await served.encode_text("x" * longest * 10, 10)
    with pytest.raises(TooLongError, match="at least"):
        await served.encode_chat([{"role": "user", "content": LONG}], most=10)
    assert len(await served.encode_text("x" * 10, 10)) == 10
    assert len(await served.encode_text("x" * longest * 11)) == longest * 11


@pytest.mark.parametrize(
    ("change", "text"), [("normalizer", "x" * 1000), ("splits", "x" * 1000), ("added", " " * 1000 + "y")]
)
async def test_where_a_token_may_stand_for_any_text_its_bytes_say_nothing(change: str, text: str) -> None:
    described = json.loads(byte_level_tokenizer().to_str())
    if change == "normalizer":
        described["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    elif change == "splits":
        removed = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False}
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [removed, described["pre_tokenizer"]]}
    else:
        described["added_tokens"][0] |= {"content": "y", "lstrip": True}
    assert len(await model(json.dumps(described)).encode_text(text, 10)) <= 10


async def test_words_are_counted() -> None:
    with pytest.raises(TooLongError, match="has 3000 tokens"):
        await model(space_prefix_tokenizer().to_str()).encode_text("the" * 1000, 10)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded += 1
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_the_text_of_a_token_is_decoded_once() -> None:
    served = model()
    counting = Counting(served.tokenizer)
    served.tokenizer = counting  # type: ignore[assignment]
    texts = [[served.token_text(token) for token in range(20)] for _ in range(50)]
    assert texts == [texts[0]] * 50
    assert counting.decoded <= 2 * 20


@pytest.mark.parametrize("spare", [0, 1])
def test_it_is_known_whether_the_tokenizers_own_ids_are_the_models(spare: int) -> None:
    tokenizer = byte_level_tokenizer()
    described = execution_pb2.GetModelResponse(
        vocab_size=tokenizer.get_vocab_size() - 1 + spare, tokenizer_json=tokenizer.to_str().encode()
    )
    assert ModelInfo(described, execution_pb2.GetExecutorResponse(block_size=16)).own_ids_fit == bool(spare)


async def test_the_tokenizers_own_special_tokens_can_be_left_out() -> None:
    described = json.loads(byte_level_tokenizer().to_str())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}},
    }
    served = model(json.dumps(described))
    with_special, without = [await served.encode_text("cat", add_special=special) for special in (True, False)]
    assert list(with_special) == [0, *without]
    assert [await served.decode(with_special, skip_special=skip) for skip in (False, True)] == ["<eos>cat", "cat"]
