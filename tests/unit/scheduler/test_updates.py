"""When the running batch reports progress."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from scheduler.bridge import CacheUpdate
from scheduler.core.batch import GATHER_STEPS
from scheduler.core.step_message import build_step
from scheduler.sequence import Sequence
from tests.support.scheduler.sequences import BLOCK, Pipeline, answer, batch_of, depths, sequence, traffic, updates


@given(traffic(), st.integers(1, 64), depths)
def test_all_progress_is_reported_once(sequences: list[Sequence], budget: int, depth: int) -> None:
    batch = batch_of(*sequences)
    pipeline = Pipeline(batch, depth)
    computed: dict[int, int] = {}
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    while len(batch):
        if step := pipeline.turn(batch.plan(budget)):
            answer(batch, step)
        update = updates(batch, everything=False)[1]
        for handle, progress in update.progress.items():
            assert progress.computed > computed.get(handle, 0)
            computed[handle] = progress.computed
            tokens[handle] += progress.token_ids
        # The progress of a released sequence is reported with it at the latest.
        assert set(update.released) <= computed.keys()
    for item in sequences:
        assert computed[item.handle] == item.computed
        assert tokens[item.handle] == list(item.token_ids[len(item.request.prompt_ids) :])


def reports(item: Sequence, steps: int) -> list[CacheUpdate]:
    """What a lone sequence's steps bring, each answered before the next."""
    batch = batch_of(item)
    result = []
    for number in range(1, steps + 1):
        answer(batch, build_step(number, batch.plan(64), batch.removed)[1])
        result.append(updates(batch, everything=False)[1])
    return result


def test_progress_that_is_not_urgent_is_gathered() -> None:
    reported = [bool(one.progress) for one in reports(sequence(1, 8, max_tokens=100, blocks=50), 3 * GATHER_STEPS)]
    # With the first token the prompt can be shared: this is reported at once.
    assert reported == [step % GATHER_STEPS == 0 for step in range(3 * GATHER_STEPS)]


def test_progress_is_reported_at_once_when_blocks_run_out() -> None:
    reported = [bool(one.progress) for one in reports(sequence(1, 8, max_tokens=100, blocks=8), 8 * BLOCK - 8)]
    assert all(reported[-4:])
    assert not all(reported)


def test_the_last_progress_comes_with_the_release() -> None:
    *_, last = reports(sequence(1, 8, max_tokens=4, blocks=50), 4)
    assert last.released == [1]
    assert list(last.progress[1].token_ids) == [1, 1, 1]


def test_merged_updates_ask_for_private_blocks_until_the_sequence_is_released() -> None:
    merged = CacheUpdate()
    merged.merge(CacheUpdate(evicting={1: False, 2: False}))
    assert not merged.is_urgent
    merged.merge(CacheUpdate(evicting={1: True}))
    merged.merge(CacheUpdate(evicting={1: False}))
    assert (merged.is_urgent, merged.evicting) == (True, {1: True, 2: False})
    merged.merge(CacheUpdate(released=[1], relocated={2: 20}))
    assert (merged.released, merged.evicting, merged.relocated) == ([1], {2: False}, {2: 20})
