"""A step that cannot be applied names its field and sequence, and changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor.cache.shares import Shares
from executor.errors import (
    CapacityExceededError,
    ExecutorError,
    InvalidStepError,
    StepOutOfOrderError,
    UnknownSequenceError,
)
from executor.step import BlockTableUpdate, Copy, NewSequence, Step
from tests.unit.executor.conftest import Driver, load
from tests.unit.executor.tiny_models import VOCAB

PROMPT = [5, 6, 7, 8, 9, 10]
GOOD = NewSequence(2, tuple(PROMPT), 6, 0, ((50, 51),))

BAD_STEPS: dict[str, tuple[dict[str, Any], type[ExecutorError], str]] = {
    "removes_an_unknown_sequence": ({"removed": (9,)}, UnknownSequenceError, "removed_sequences"),
    "grants_a_chunk_to_an_unknown_sequence": ({"chunks": {9: 1}}, UnknownSequenceError, "chunk_sequences"),
    "idles_an_unknown_sequence": ({"idle": frozenset({9})}, UnknownSequenceError, "idle_sequences"),
    "idles_a_sequence_that_it_removes": (
        {"removed": (1,), "idle": frozenset({1})},
        UnknownSequenceError,
        "idle_sequences",
    ),
    "grows_an_unknown_sequence": (
        {"table_updates": (BlockTableUpdate(9, 0, (1,)),)},
        UnknownSequenceError,
        "table_sequences",
    ),
    "grows_an_unknown_group": ({"table_updates": (BlockTableUpdate(1, 1, (1,)),)}, InvalidStepError, "table_groups"),
    "grows_by_a_slot_beyond_the_pool": (
        {"table_updates": (BlockTableUpdate(1, 0, (201,)),)},
        InvalidStepError,
        "table_slots",
    ),
    "grows_by_the_null_block": ({"table_updates": (BlockTableUpdate(1, 0, (0,)),)}, InvalidStepError, "table_slots"),
    "joins_a_sequence_twice": (
        {"new_sequences": (replace(GOOD, sequence=1),)},
        InvalidStepError,
        "new_sequences.sequence",
    ),
    "joins_without_tokens": (
        {"new_sequences": (replace(GOOD, token_ids=()),)},
        InvalidStepError,
        "new_sequences.token_ids",
    ),
    "joins_with_an_id_beyond_the_vocabulary": (
        {"new_sequences": (replace(GOOD, token_ids=(1, VOCAB)),)},
        InvalidStepError,
        "new_sequences.token_ids",
    ),
    "joins_with_more_tokens_than_positions": (
        {"new_sequences": (replace(GOOD, token_ids=(1,) * 257),)},
        InvalidStepError,
        "new_sequences.token_ids",
    ),
    "joins_with_everything_computed": (
        {"new_sequences": (replace(GOOD, num_computed_tokens=6),)},
        InvalidStepError,
        "new_sequences.num_computed_tokens",
    ),
    "joins_with_more_prompt_than_tokens": (
        {"new_sequences": (replace(GOOD, num_prompt_tokens=7),)},
        InvalidStepError,
        "new_sequences.num_prompt_tokens",
    ),
    "joins_with_a_table_too_many": (
        {"new_sequences": (replace(GOOD, tables=((1,), (1,))),)},
        InvalidStepError,
        "new_sequences.block_tables",
    ),
    "joins_with_a_slot_beyond_the_pool": (
        {"new_sequences": (replace(GOOD, tables=((50, 201),)),)},
        InvalidStepError,
        "new_sequences.block_tables.slots",
    ),
    "joins_with_a_null_block": (
        {"new_sequences": (replace(GOOD, tables=((0, 51),)),)},
        InvalidStepError,
        "new_sequences.block_tables.slots",
    ),
    "joins_with_computed_tokens_outside_its_table": (
        {"new_sequences": (replace(GOOD, num_computed_tokens=5, tables=((50,),)),)},
        InvalidStepError,
        "new_sequences.block_tables.slots",
    ),
    "grants_more_than_is_known": ({"chunks": {1: 2}}, InvalidStepError, "chunk_tokens"),
    "grants_nothing": ({"chunks": {1: 0}}, InvalidStepError, "chunk_tokens"),
    "grants_to_a_sequence_that_sits_out": (
        {"chunks": {1: 1}, "idle": frozenset({1})},
        InvalidStepError,
        "idle_sequences",
    ),
    "computes_beyond_a_new_table": (
        {"new_sequences": (replace(GOOD, tables=((50,),)),), "chunks": {2: 6}},
        CapacityExceededError,
        "table_slots",
    ),
    "copies_in_an_unknown_group": ({"copies": (Copy(1, 1, 1, 2),)}, InvalidStepError, "copy_groups"),
    "copies_from_the_null_block": ({"copies": (Copy(1, 0, 0, 2),)}, InvalidStepError, "copy_source_slots"),
    "copies_beyond_the_pool": ({"copies": (Copy(1, 0, 1, 201),)}, InvalidStepError, "copy_target_slots"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_is_refused_whole(name: str, driver: Driver) -> None:
    changes, error, field = BAD_STEPS[name]
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT),), chunks={1: 6})
    before = driver.runner.pools.pools[0].last_write_steps.copy()
    with pytest.raises(error) as caught:
        driver.step(**changes)
    assert list(caught.value.fields) == [field]
    assert (driver.runner.pools.pools[0].last_write_steps == before).all()
    assert (driver.runner.last_step, driver.runner.num_sequences) == (1, 1)
    # The same session could go on: the running set is what it was.
    assert [one.sequence for one in driver.step().sampled] == [1]


@pytest.mark.parametrize("number", [1, 3, 0])
def test_steps_are_consecutive(number: int, driver: Driver) -> None:
    driver.step()
    with pytest.raises(StepOutOfOrderError, match="after step 1"):
        driver.runner.launch(Step(number))


def test_a_silent_sequence_without_room_is_refused_and_an_idle_one_is_not(driver: Driver) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT[:4], room=0),), chunks={1: 4})
    with pytest.raises(CapacityExceededError) as caught:
        driver.step()
    assert caught.value.metadata == {"sequence": "1"}
    assert driver.step(idle=frozenset({1})).sampled == ()
    assert len(driver.step(table_updates=(BlockTableUpdate(1, 0, (60,)),)).sampled) == 1


def test_a_sequence_ends_at_the_models_last_position(driver: Driver) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, [3] * 255),), chunks={1: 255})
    driver.step()
    with pytest.raises(CapacityExceededError, match="the model takes 256"):
        driver.step()


def test_a_windowed_group_takes_null_blocks_that_are_out_of_sight(model_folder: Callable[[str], Path]) -> None:
    driver = Driver(load(model_folder("mistral")))
    tokens = tuple(range(24))
    # Window 9, 20 tokens computed: token 20 sees tokens 12 to 20, which begin in block 3.
    tables = ((0, 0, 0, 10, 11, 12),)
    driver.step(new_sequences=(NewSequence(1, tokens, 24, 20, tables),))
    with pytest.raises(InvalidStepError, match="entry 3 is 0"):
        driver.step(new_sequences=(NewSequence(2, tokens, 24, 20, ((0, 0, 0, 0, 11, 12),)),))


def test_each_group_has_slots_of_its_own_number(model_folder: Callable[[str], Path]) -> None:
    driver = Driver(load(model_folder("gemma3")), num_blocks=Shares.fixed((4, 6)))
    prompt = tuple(PROMPT)
    for tables, last in ((((1, 5), (1, 2)), 4), (((1, 2), (1, 7)), 6)):
        with pytest.raises(InvalidStepError, match=f"must be from 1 to {last}, entry 1 is {last + 1}"):
            driver.step(new_sequences=(NewSequence(1, prompt, 6, 0, tables),), chunks={1: 6})
    assert len(driver.step(new_sequences=(NewSequence(1, prompt, 6, 0, ((1, 4), (1, 6))),), chunks={1: 6}).sampled) == 1
    with pytest.raises(InvalidStepError, match="must be from 1 to 4, entry 0 is 5"):
        driver.step(table_updates=(BlockTableUpdate(1, 0, (5,)),))
    driver.step(table_updates=(BlockTableUpdate(1, 0, (2,)), BlockTableUpdate(1, 1, (5,))), copies=(Copy(1, 1, 6, 3),))
    with pytest.raises(InvalidStepError, match="copy_target_slots must be from 1 to 4, is 5"):
        driver.step(copies=(Copy(2, 0, 1, 5),))
