"""Cached blocks after a prompt: an admission returns their tokens as far as requested and permitted."""

import dataclasses

import pytest

from cachemgr.slices import at_once
from cachemgr.types import ExtraKey, ForgetTarget
from protos.errors import InvalidField
from tests.support.in_process_manager import CONFIG, World

TEXT = list(range(10, 33))


def behind(world: World, prompt: list[int], most: int = 100, **options: object) -> list[int]:
    """The continuation of a prompt; ends the sequence that asked for it."""
    admission = world.admit(prompt, max_continuation=most, no_store=True, **options)
    assert admission.admitted
    world.leave(world.live[f"q{world.names}"])
    world.sync()
    world.check()
    return list(admission.continuation)


@pytest.fixture(params=[{}, {"copy_on_partial_reuse": False}], ids=["copies", "take-overs"])
def world(request: pytest.FixtureRequest) -> World:
    world = World(24, config=dataclasses.replace(CONFIG, **request.param))
    world.cache(TEXT, salt="a")
    return world


@pytest.mark.parametrize("length", range(1, len(TEXT) + 1))
def test_the_rest_of_a_text_follows_its_beginning(length: int) -> None:
    world = World(24)
    world.cache(TEXT)
    assert behind(world, TEXT[:length]) == TEXT[length:]


def test_no_more_than_is_asked_for(world: World) -> None:
    assert behind(world, TEXT[:6], 5, salt="a") == TEXT[6:11]
    assert behind(world, TEXT[:6], 0, salt="a") == []
    with pytest.raises(InvalidField, match="max_continuation_tokens"):
        world.admit(TEXT, max_continuation=1 << 20)


def test_another_scope_has_no_continuation(world: World) -> None:
    assert behind(world, TEXT[:6]) == []
    assert behind(world, TEXT[:6], salt="b") == []
    assert behind(world, TEXT[:6], salt="a", adapter_id=1) == []
    assert behind(world, TEXT[:6], salt="a", no_read=True) == []
    assert behind(world, TEXT[:6], salt="a", extra_keys=(ExtraKey(0, 2, b"x"),)) == []
    assert behind(world, [*TEXT[:6], 99], salt="a") == []


def test_of_several_continuations_the_one_with_most_hits_follows() -> None:
    world = World(40)
    texts = [TEXT[:8] + [first + at for at in range(8)] for first in (50, 60, 70)]
    for text in texts:
        world.cache(text)
    for _ in range(2):
        world.cache([*texts[1], 1])
    assert behind(world, TEXT[:8]) == [*texts[1][8:], 1]


def test_what_was_forgotten_does_not_follow(world: World) -> None:
    at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
    assert behind(world, TEXT[:6], salt="a") == []


def test_it_survives_the_managers_restart_and_tiers() -> None:
    world = World(8, host_blocks=16)
    world.cache(TEXT)
    world.restart_manager()
    assert behind(world, TEXT[:6]) == TEXT[6:]
    world.cache(list(range(100, 130)))
    world.run_executor_copies()
    assert behind(world, TEXT[:6]) == TEXT[6:]
