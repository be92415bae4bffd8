"""Shares of memory of a model's layer groups: the best shares for sequences of the expected length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.manager import CacheManager
from cachemgr.types import AdmitRequest, ExecutorSpec, ManagerConfig, PoolSpec, SyncRequest
from executor.cache.shares import Shares, share_memory
from executor.errors import ModelError
from executor.settings import ExecutorSettings
from protos.rpc.settings import SettingsError, load

BLOCK_SIZE = 16


def share(windows=(None, 256), sizes=(1, 1), memory=1024, *, expected=2048, longest=2048, **options) -> Shares:
    return share_memory(windows, sizes, memory, BLOCK_SIZE, expected_tokens=expected, longest_tokens=longest, **options)


def test_one_group_has_all_memory_whatever_its_window_is() -> None:
    assert share((None,), (3,), 100) == Shares.fixed([33])
    assert share((256,), (3,), 100, movable=True) == Shares.fixed([33])


def running_at_once(blocks: tuple[int, ...], prompt: int, window: int = 256) -> int:
    """Prompts that a cache manager admits one after the other, each once the one before is computed."""
    manager = CacheManager(1, lambda: 0.0, ManagerConfig(lease_seconds=math.inf))
    manager.register_scheduler("s", 1)
    pools = [PoolSpec(0, blocks[0]), PoolSpec(1, blocks[1], window)]
    manager.register_executor(ExecutorSpec("e", 1, "m", bytes(32), BLOCK_SIZE, pools))
    for number in range(1000):
        tokens = list(range(number * prompt, (number + 1) * prompt))
        admission = manager.admit(AdmitRequest(str(number), "s", 1, "e", tokens))
        if not admission.admitted:
            return number
        computed = {"handles": [admission.sequence_handle], "computed_tokens": [prompt]}
        news = {"new_token_counts": [1], "new_token_ids": [7]}
        manager.sync(SyncRequest("s", 1, 1, number + 1, step=number + 1, **computed, **news))
    raise AssertionError


def test_more_prompts_run_at_once_than_with_equal_numbers_of_blocks() -> None:
    blocks = share().blocks
    assert sum(blocks) <= 1024
    assert running_at_once((512, 512), 2047) == 3
    assert running_at_once(blocks, 2047) >= 5


@pytest.mark.parametrize(("prompt", "gain"), [(200, 0.7), (1000, 1.2), (2047, 2.0), (8000, 2.0)])
def test_more_run_at_once_also_where_prompts_are_longer_and_not_much_fewer_where_they_are_shorter(
    prompt: int, gain: float
) -> None:
    # As of Gemma 3: five layers with a window of 512 tokens to each with full attention.
    blocks = share((None, 512), (1, 5), 6 * 4096, longest=8192).blocks
    assert running_at_once(blocks, prompt, 512) >= gain * running_at_once((4096, 4096), prompt, 512)


windows = st.lists(st.one_of(st.none(), st.integers(1, 600)), min_size=1, max_size=4)


@given(
    windows=windows,
    sizes=st.lists(st.integers(1, 300), min_size=4, max_size=4),
    equal=st.integers(1, 3000),
    rest=st.integers(0, 1000),
    expected=st.integers(1, 20_000),
    longest=st.integers(1, 20_000),
    movable=st.booleans(),
)
def test_shares_fit_the_memory_and_hold_every_prompt_that_equal_ones_would(
    windows, sizes, equal, rest, expected, longest, movable
) -> None:
    sizes = sizes[: len(windows)]
    memory = equal * sum(sizes) + min(rest, sum(sizes) - 1)
    shares = share(windows, sizes, memory, expected=expected, longest=longest, movable=movable)
    used = sum(count * size for count, size in zip(shares.blocks, sizes, strict=True))
    assert used <= memory
    assert min(shares.blocks) >= min(equal, -(-longest // BLOCK_SIZE))
    # What is left is of no use to a sequence.
    assert memory - used < max(sizes) + sum(sizes)
    assert all(count <= slots for count, slots in zip(shares.blocks, shares.slots, strict=True))
    if not movable or len(windows) == 1:
        assert shares == Shares.fixed(shares.blocks)
    else:
        others = [sum(sizes) - size for size in sizes]
        largest = [(memory - rest) // size for rest, size in zip(others, sizes, strict=True)]
        assert (list(shares.slots), shares.memory_bytes) == (largest, memory)


def test_given_shares_are_shares_of_the_bytes_and_for_good() -> None:
    assert share(sizes=(2, 1), memory=900, weights=(2, 1), movable=True) == Shares.fixed([300, 300])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((1,), "has 1 shares, and the model has 2 layer groups: full attention, window 256"),
        ((1, 1, 1), "has 3 shares"),
        ((1, 1e-9), "gives layer group 1 less than a block of 1 bytes; all groups together have 1024 bytes"),
    ],
)
def test_shares_that_do_not_fit_the_model_are_refused(weights, words) -> None:
    with pytest.raises(ModelError, match=f"^KVKEEP_EXECUTOR_POOL_SHARES: {words}"):
        share(weights=weights)


def test_shares_are_read_as_numbers_with_commas() -> None:
    assert load(ExecutorSettings, {}).given_shares == ()
    assert load(ExecutorSettings, {"KVKEEP_EXECUTOR_POOL_SHARES": "3,1.5"}).given_shares == (3, 1.5)


@pytest.mark.parametrize("value", ["a", "1,", "1,-1", "0,1", "1;2", "nan,1", "inf,1"])
def test_other_shares_are_refused_at_the_start(value: str) -> None:
    with pytest.raises(SettingsError, match="KVKEEP_EXECUTOR_POOL_SHARES"):
        load(ExecutorSettings, {"KVKEEP_EXECUTOR_POOL_SHARES": value})
