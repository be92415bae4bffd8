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
from executor.step import MAX_SEQUENCES, BlockTableUpdate, Copy, NewSequence, Step
from tests.unit.executor.conftest import Driver, load
from tests.unit.executor.tiny_models import VOCAB

PROMPT = [5, 6, 7, 8, 9, 10]


def joins(**changes: Any) -> dict[str, Any]:
    """A step that a sequence joins, right but for the changes."""
    return {"new_sequences": (replace(NewSequence(2, tuple(PROMPT), 6, 0, ((50, 51),)), **changes),)}


def grows(sequence: int, group: int, slot: int) -> dict[str, Any]:
    """A step that gives a sequence a block."""
    return {"table_updates": (BlockTableUpdate(sequence, group, (slot,)),)}


BAD_STEPS: dict[type[ExecutorError], dict[str, tuple[dict[str, Any], str]]] = {
    UnknownSequenceError: {
        "removes an unknown sequence": ({"removed": (9,)}, "removed_sequences"),
        "grants a chunk to an unknown sequence": ({"chunks": {9: 1}}, "chunk_sequences"),
        "idles an unknown sequence": ({"idle": frozenset({9})}, "idle_sequences"),
        "idles a sequence that it removes": ({"removed": (1,), "idle": frozenset({1})}, "idle_sequences"),
        "grows an unknown sequence": (grows(9, 0, 1), "table_sequences"),
    },
    InvalidStepError: {
        "grows an unknown group": (grows(1, 1, 1), "table_groups"),
        "grows by a slot beyond the pool": (grows(1, 0, 201), "table_slots"),
        "grows by the null block": (grows(1, 0, 0), "table_slots"),
        "joins a sequence twice": (joins(sequence=1), "new_sequences.sequence"),
        "joins sequences without end": (
            {"new_sequences": tuple(NewSequence(2 + n, (5,), 1, 0, ((50,),)) for n in range(MAX_SEQUENCES))},
            "new_sequences.sequence",
        ),
        "joins without tokens": (joins(token_ids=()), "new_sequences.token_ids"),
        "joins with an id beyond the vocabulary": (joins(token_ids=(1, VOCAB)), "new_sequences.token_ids"),
        "joins with more tokens than positions": (joins(token_ids=(1,) * 257), "new_sequences.token_ids"),
        "joins with everything computed": (joins(num_computed_tokens=6), "new_sequences.num_computed_tokens"),
        "joins with more prompt than tokens": (joins(num_prompt_tokens=7), "new_sequences.num_prompt_tokens"),
        "joins with a table too many": (joins(tables=((1,), (1,))), "new_sequences.block_tables"),
        "joins with a slot beyond the pool": (joins(tables=((50, 201),)), "new_sequences.block_tables.slots"),
        "joins with a null block": (joins(tables=((0, 51),)), "new_sequences.block_tables.slots"),
        "joins with computed tokens outside its table": (
            joins(num_computed_tokens=5, tables=((50,),)),
            "new_sequences.block_tables.slots",
        ),
        "grants more than is known": ({"chunks": {1: 2}}, "chunk_tokens"),
        "grants nothing": ({"chunks": {1: 0}}, "chunk_tokens"),
        "grants to a sequence that sits out": ({"chunks": {1: 1}, "idle": frozenset({1})}, "idle_sequences"),
        "copies in an unknown group": ({"copies": (Copy(1, 1, 1, 2),)}, "copy_groups"),
        "copies from the null block": ({"copies": (Copy(1, 0, 0, 2),)}, "copy_source_slots"),
        "copies beyond the pool": ({"copies": (Copy(1, 0, 1, 201),)}, "copy_target_slots"),
    },
    CapacityExceededError: {
        "computes beyond a new table": (joins(tables=((50,),)) | {"chunks": {2: 6}}, "table_slots"),
    },
}
CASES = [
    pytest.param(changes, error, field, id=name)
    for error, steps in BAD_STEPS.items()
    for name, (changes, field) in steps.items()
]


@pytest.mark.parametrize(("changes", "error", "field"), CASES)
def test_a_bad_step_is_refused_whole(
    changes: dict[str, Any], error: type[ExecutorError], field: str, driver: Driver
) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT),), chunks={1: 6})
    before = driver.runner.pools.pools[0].last_write_steps.copy()
    with pytest.raises(error) as caught:
        driver.step(**changes)
    assert list(caught.value.fields) == [field]
    assert (driver.runner.pools.pools[0].last_write_steps == before).all()
    assert (driver.runner.last_step, driver.runner.num_sequences) == (1, 1)
    # The same session could go on: the running set is unchanged.
    assert [one.sequence for one in driver.step().sampled] == [1]


@pytest.mark.parametrize("number", [1, 3, 0])
def test_steps_are_consecutive(number: int, driver: Driver) -> None:
    driver.step()
    with pytest.raises(StepOutOfOrderError, match="after step 1"):
        driver.runner.prepare(Step(number))


def test_a_silent_sequence_without_slots_is_refused_and_an_idle_one_is_not(driver: Driver) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT[:4], room=0),), chunks={1: 4})
    with pytest.raises(CapacityExceededError) as caught:
        driver.step()
    assert caught.value.metadata == {"sequence": "1"}
    assert driver.step(idle=frozenset({1})).sampled == ()
    assert len(driver.step(table_updates=(BlockTableUpdate(1, 0, (60,)),)).sampled) == 1


def test_a_sequence_ends_at_the_models_last_position(driver: Driver) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, [3] * 255),), chunks={1: 255})
    driver.step()
    with pytest.raises(CapacityExceededError, match="the model takes 256") as caught:
        driver.step()
    assert list(caught.value.fields) == ["idle_sequences"]


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
