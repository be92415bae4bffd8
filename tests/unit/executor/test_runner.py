"""The runner beside computing: recomputation, stops, copies, log-probabilities, and its records."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executor.cache.pool import KvPools, block_bytes, count_blocks
from executor.core.runner import disjoint_runs
from executor.models.forward import Model
from executor.step import Copy, NewSequence, Sampling
from tests.unit.executor.conftest import BLOCK_SIZE, PATHS, Driver, on_torch

PROMPT = [5, 60, 7, 80, 9, 10, 11, 3, 44]
RANDOM = Sampling(
    temperature=1.2, top_k=20, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, seed=42
)


@pytest.fixture(scope="module", params=PATHS)
def tiny(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


def _ids(driver: Driver, sequence: int, tokens: list[int], count: int, sampling: Sampling) -> list[int]:
    return [one.token_id for one in driver.generate(sequence, tokens, count, sampling)]


def test_recomputation_after_a_preemption_draws_the_same_tokens(driver: Driver) -> None:
    whole = _ids(driver, 1, PROMPT, 20, RANDOM)
    known = PROMPT + whole[:8]
    driver.step(new_sequences=(driver.new_sequence(2, known, RANDOM, prompt=len(PROMPT)),), chunks={2: 6})
    rest = [driver.step(chunks={2: len(known) - 6}).sampled[0].token_id]
    rest += [driver.step().sampled[0].token_id for _ in range(11)]
    assert rest == whole[8:]
    assert len(set(whole)) > 5


def test_company_in_the_batch_changes_nothing(driver: Driver) -> None:
    alone = _ids(driver, 1, PROMPT, 12, RANDOM)
    others = tuple(
        driver.new_sequence(10 + i, [i + 1] * (i + 2), sampling)
        for i, sampling in enumerate([Sampling(), Sampling(temperature=1.0, seed=5), Sampling(repetition_penalty=2.0)])
    )
    together = []
    outcome = driver.step(
        new_sequences=(*others, driver.new_sequence(2, PROMPT, RANDOM)), chunks={2: len(PROMPT), 10: 2, 11: 3, 12: 4}
    )
    for turn in range(12):
        together += [one.token_id for one in outcome.sampled if one.sequence == 2]
        outcome = driver.step(removed=(10,) if turn == 5 else ())
    assert together[:12] == alone


def test_a_stopped_sequence_is_silent_until_it_is_removed(driver: Driver) -> None:
    outputs = _ids(driver, 1, PROMPT, 6, Sampling())
    stop = Sampling(stop_token_ids=frozenset({outputs[3]}))
    sampled = driver.generate(2, PROMPT, 6, stop)
    first = outputs.index(outputs[3])
    assert [one.token_id for one in sampled] == outputs[: first + 1]
    assert [one.stopped for one in sampled] == [False] * first + [True]
    driver.step(
        new_sequences=(driver.new_sequence(3, PROMPT, Sampling(stop_token_ids=frozenset(outputs))),), chunks={3: 9}
    )
    silent = driver.step()
    assert (silent.sampled, silent.num_tokens) == ((), 0)
    assert driver.runner.num_sequences == 1


def test_a_copied_block_serves_a_second_sequence(driver: Driver) -> None:
    joining = driver.new_sequence(1, PROMPT)
    expected = driver.step(new_sequences=(joining,), chunks={1: len(PROMPT)}).sampled[0].token_id
    source, shared = joining.tables[0][1], joining.tables[0][0]
    target, last = driver.blocks(2 * BLOCK_SIZE)[0]
    outcome = driver.step(
        removed=(1,),
        # Seven tokens are there: a shared block, and three tokens of a copied one.
        new_sequences=(NewSequence(2, tuple(PROMPT), len(PROMPT), 7, ((shared, target, last),)),),
        chunks={2: 2},
        copies=(Copy(77, 0, source, target),),
    )
    assert outcome.sampled[0].token_id == expected
    assert outcome.tickets == (77,)
    assert outcome.num_tokens == 2


def test_the_last_write_of_every_slot_is_noted(driver: Driver) -> None:
    joining = driver.new_sequence(1, PROMPT, room=8)
    slots = joining.tables[0]
    driver.step(new_sequences=(joining,), chunks={1: 6})
    driver.step(chunks={1: 3})
    spare = driver.blocks(BLOCK_SIZE)[0][0]
    driver.step(copies=(Copy(1, 0, slots[0], spare),), idle=frozenset({1}))
    steps = driver.runner.pools.pools[0].last_write_steps
    assert [int(steps[slot]) for slot in slots[:4]] == [1, 2, 2, 0]
    assert int(steps[spare]) == 3
    assert int((steps > 0).sum()) == 4


def test_clearing_keeps_what_the_pools_hold(driver: Driver) -> None:
    joining = driver.new_sequence(1, PROMPT)
    expected = driver.step(new_sequences=(joining,), chunks={1: len(PROMPT)}).sampled[0].token_id
    driver.runner.clear()
    assert driver.runner.num_sequences == 0
    again = NewSequence(1, tuple(PROMPT), len(PROMPT), len(PROMPT) - 1, joining.tables)
    assert driver.step(new_sequences=(again,)).sampled[0].token_id == expected


def test_many_sequences_may_join_at_once(tiny: Model) -> None:
    driver = Driver(tiny, num_blocks=600)
    joining = tuple(driver.new_sequence(i, [i % 90, 3], room=4) for i in range(200))
    first = driver.step(new_sequences=joining, chunks=dict.fromkeys(range(200), 2))
    second = driver.step()
    assert len(first.sampled) == len(second.sampled) == 200
    alone = Driver(tiny).generate(1, [7, 3], 2)
    assert [first.sampled[7].token_id, second.sampled[7].token_id] == [one.token_id for one in alone]


def test_logprobs_come_only_for_requests_that_ask(driver: Driver) -> None:
    asking = driver.new_sequence(1, PROMPT, Sampling(num_logprobs=3))
    outcome = driver.step(new_sequences=(asking, driver.new_sequence(2, PROMPT)), chunks={1: 9, 2: 9})
    logprobs = outcome.sampled[0].logprobs
    assert logprobs is not None
    assert logprobs.top_ids[0] == outcome.sampled[0].token_id
    assert logprobs.logprob == logprobs.top_logprobs[0]
    assert len(logprobs.top_ids) == 3
    assert outcome.sampled[1].logprobs is None


def test_an_empty_step_computes_nothing(driver: Driver) -> None:
    outcome = driver.step()
    assert (outcome.num_tokens, outcome.sampled) == (0, ())


def test_times_of_a_step_are_reported(driver: Driver) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT),), chunks={1: 9})
    outcome = driver.step()
    assert outcome.compute_time > 0
    assert outcome.idle_time >= 0


def test_a_step_that_fails_leaves_no_span_to_the_next_session(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.step(new_sequences=(driver.new_sequence(1, PROMPT),), chunks={1: len(PROMPT)})
    with monkeypatch.context() as failing:
        failing.setattr(driver.runner.pools, "mark_written", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.step()
    # As the worker does after a failed step. The time since a span without an end cannot be asked for on CUDA.
    driver.runner.clear()
    assert driver.step(new_sequences=(driver.new_sequence(2, PROMPT),), chunks={2: len(PROMPT)}).idle_time == 0


def test_dependent_copies_run_one_after_the_other() -> None:
    chain = (Copy(1, 0, 1, 2), Copy(2, 0, 3, 4), Copy(3, 0, 2, 5), Copy(4, 1, 2, 3), Copy(5, 0, 6, 2))
    assert [[copy.ticket for copy in run] for run in disjoint_runs(chain)] == [[1, 2], [3, 4], [5]]


def test_the_pool_takes_the_lesser_of_both_limits(model_folder: Callable[[str], Path]) -> None:
    groups = on_torch(model_folder("llama")).groups
    sizes = block_bytes(groups, BLOCK_SIZE, torch.float32)

    # 4 layers, K and V, 2 heads of 8 elements of 4 bytes: 512 bytes a token, 2048 a block of four.
    def blocks(max_tokens: int) -> int:
        return count_blocks(sizes, BLOCK_SIZE, max_tokens=max_tokens, free_bytes=41_000, fraction=0.5)

    assert blocks(0) == 9
    assert blocks(1000) == 9
    assert blocks(19) == 4
    pools = KvPools(groups, 9, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    assert pools.pools[0].block_bytes == 2048
    assert pools.max_tokens == 36
