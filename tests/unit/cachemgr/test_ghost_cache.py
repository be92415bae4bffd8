"""Ghost caches predict the hits of a pool of another size, or of one without retention."""

import random
from dataclasses import replace

import pytest

from bench.driver import CONFIG, Driver, prompt
from bench.replay import Replay
from bench.trace import no_retention
from bench.trace_file import BLOCK_TOKENS, Conversations, Request
from cachemgr.errors import UnknownExecutorError
from cachemgr.operators.state_dump import state_hash
from cachemgr.slices import at_once
from cachemgr.telemetry.ghost_cache import ghosts_of
from cachemgr.types import GhostPolicy, Retention, RetentionRange
from tests.support.in_process_manager import POLICIES, World

BLOCKS = 400
POINT = 0.01
KEEP = Retention((RetentionRange(0, None, 60, 30.0),))
LRU, RETENTION, REUSED = (GhostPolicy.LRU, GhostPolicy.RETENTION, GhostPolicy.SEGMENTED_LRU)


def conversations(count, seed=1):
    """Requests of conversations that begin alike, grow, and are taken up again, some of them late."""
    rng = random.Random(seed)
    placer, open_ones, requests, fresh = Conversations(), [], [], 10
    for number in range(count):
        if open_ones and rng.random() < 0.6:
            ids = open_ones.pop(-1 - min(len(open_ones) - 1, int(rng.expovariate(0.05))))
        else:
            ids = tuple(range(rng.choice((1, 3))))
        ids += tuple(range(fresh, fresh + rng.randrange(1, 6)))
        fresh += 6
        open_ones.append(ids)
        length = len(ids) * BLOCK_TOKENS - rng.randrange(1, 500)
        requests.append(placer.assign(Request(number * 0.5, length, rng.randrange(1, 400), ids)))
    return requests


def some_retention(requests):
    """Every third conversation is to be kept for half a minute."""
    return [KEEP if request.conversation % 3 == 0 else None for request in requests]


RATES = {}


def rate(requests, num_blocks, retentions):
    """Of a pool that really has this size."""
    case = len(requests), num_blocks, retentions
    if case not in RATES:
        RATES[case] = Replay(num_blocks, BLOCK_TOKENS).run(requests, retentions(requests)).hit_rate
    return RATES[case]


def ghost_rates(replay, policy):
    report = replay.ghosts()
    return {one.total_blocks: one.hit_tokens / report.queried_tokens for one in report.caches if one.policy is policy}


@pytest.fixture(scope="module")
def requests():
    return conversations(700)


# Half of 400 blocks is a small sample.
@pytest.mark.parametrize(("sample", "close"), [(BLOCKS, POINT), (BLOCKS // 2, 2.5 * POINT)])
def test_ghosts_are_within_a_point_of_pools_of_their_size(requests, sample, close):
    retentions = some_retention
    replay = Replay(BLOCKS, BLOCK_TOKENS, sample)
    outcome = replay.run(requests, retentions(requests))
    assert replay.ghosts().hit_tokens == outcome.found
    assert replay.ghosts().queried_tokens == outcome.asked
    rates = ghost_rates(replay, RETENTION)
    assert rates[BLOCKS] == pytest.approx(outcome.hit_rate, abs=close)
    real = {size: rate(requests, size, retentions) for size in (BLOCKS // 2, 2 * BLOCKS)}
    # It is a curve at all.
    assert real[2 * BLOCKS] > outcome.hit_rate + 3 * POINT > real[BLOCKS // 2] + 6 * POINT
    for size, found in real.items():
        assert rates[size] == pytest.approx(found, abs=close)
    plain = rate(requests, BLOCKS, no_retention)
    assert ghost_rates(replay, LRU)[BLOCKS] == pytest.approx(plain, abs=close)


def alike(rng, count, longest):
    """Prompts of which most continue one of the last from some position, as far as they are long enough."""
    prompts = []
    for _ in range(count):
        length, base = rng.randint(4, longest), []
        if prompts and rng.random() < 0.7:
            earlier = prompts[-1 - min(len(prompts) - 1, int(rng.expovariate(0.02)))]
            base = earlier[: min(length, rng.randint(1, len(earlier)))]
        prompts.append(base + [rng.randrange(2) for _ in range(length - len(base))])
    return prompts


def endless_tokens(prompts):
    """Tokens that a cache which never loses anything would find, beginnings of blocks among them."""
    seen, found = set(), 0
    for tokens in prompts:
        found += next((end for end in range(len(tokens) - 1, 0, -1) if tuple(tokens[:end]) in seen), 0)
        seen.update(tuple(tokens[:end]) for end in range(1, len(tokens) + 1))
    return found


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("longest", [24, 60])
def test_ghost_caches_predict_the_hits_of_short_prompts(longest, block_size, partial):
    prompts = alike(random.Random(longest * block_size), 700, longest)
    asked = sum(map(len, prompts))
    config = replace(
        CONFIG,
        capacity_ahead_tokens=0,
        free_watermark=0.0,
        ghost_sample=32,
        partial_reuse=partial,
        copy_on_partial_reuse=partial,
    )

    def play(num_blocks):
        driver = Driver(num_blocks, block_size=block_size, config=config)
        found = 0
        for number, tokens in enumerate(prompts):
            driver.now = number * 0.5
            found += driver.cache(str(number), tokens).cached_tokens
        return driver, found

    driver, _ = play(32)
    report, _ = driver.manager.queries.ghosts("e")
    promised = {one.total_blocks: one.hit_tokens for one in report.caches if one.policy is LRU}
    assert max(promised.values()) <= endless_tokens(prompts)
    for size in (32, 64, 128):
        assert promised[size] == pytest.approx(play(size)[1], abs=POINT * asked), size


def test_reused_blocks_outlast_others_in_a_ghost_cache():
    driver = Driver(10, config=replace(CONFIG, ghost_sample=10))
    driver.cache("first", prompt(0, 64))
    driver.cache("again", prompt(0, 64))
    for number in range(1, 5):
        driver.cache(f"once {number}", prompt(number, 64))
    assert driver.cache("late", prompt(0, 64)).cached_tokens == 0
    found, _ = driver.manager.queries.ghosts("e")
    hits = {one.policy: one.hit_blocks for one in found.caches if one.total_blocks == 10}
    assert hits == {RETENTION: 4, LRU: 4, REUSED: 8}


def test_only_computed_blocks_stay_in_a_ghost_cache():
    driver = Driver(16, config=replace(CONFIG, ghost_sample=16))
    driver.sync(released=[driver.admit("gives up", prompt(0, 64)).sequence_handle])
    driver.cache("leaves nothing", prompt(1, 64), no_store=True)
    driver.cache("looks for nothing", prompt(2, 64), no_read=True)
    for number in range(3):
        driver.cache(f"comes {number}", prompt(number, 64))
    found, pool = driver.manager.queries.ghosts("e")
    assert pool.pool_id == "e/0"
    assert found.queried_tokens == 5 * 64
    assert {one.hit_blocks for one in found.caches if one.total_blocks == 16} == {4}


@pytest.mark.parametrize("requested", POLICIES, ids=[str(requested.message().kind) for requested in POLICIES])
@pytest.mark.parametrize("store_tokens", [None, 8])
@pytest.mark.parametrize("generated", [0, 3, 40])
def test_a_ghost_cache_keeps_as_much_of_a_sequence_that_evicts_tokens_as_the_pool(requested, store_tokens, generated):
    world = World(40, config=replace(CONFIG, ghost_sample=40))
    world.executor().ghosts = ghosts_of(world.executor().pools, world.config)
    world.admit(list(range(19)), "evicts", eviction_policy=requested, store_tokens=store_tokens)
    live = world.live["evicts"]
    world.compute(live, 19 + generated)
    known = list(live.tokens)
    world.finish("evicts")
    found = world.cached_tokens([*known, 1])
    report, _ = world.queries.ghosts("e")
    assert {one.hit_tokens for one in report.caches if one.total_blocks >= 40} == {found}


def test_only_requests_in_the_time_window_count():
    driver = Driver(16, config=replace(CONFIG, ghost_sample=16))
    driver.cache("before", prompt(0, 64))
    driver.now = 100.0
    driver.cache("since", prompt(0, 64))
    found, _ = driver.manager.queries.ghosts("e", 90.0)
    assert (found.queried_tokens, found.hit_tokens) == (64, 63)
    assert {one.hit_tokens for one in found.caches if one.total_blocks == 16} == {63}
    later, _ = driver.manager.queries.ghosts("e", 120.0)
    assert later.queried_tokens == 0


def test_a_pool_that_an_operator_changes_has_ghosts_of_its_present_size():
    driver = Driver(16, config=replace(CONFIG, ghost_sample=16))
    driver.cache("before", prompt(0, 64))
    at_once(driver.manager.operators.update_pool("e/0", 8, "", validate_only=False))
    for number in range(3):
        driver.cache(f"more {number}", prompt(number, 64))
    found, _ = driver.manager.queries.ghosts("e")
    assert {one.total_blocks for one in found.caches} == {2, 4, 8, 16, 32}


def test_ghosts_change_nothing_and_are_off_without_a_sample(requests):
    with_ghosts, without = (Replay(BLOCKS, BLOCK_TOKENS, sample) for sample in (BLOCKS, 0))
    for replay in (with_ghosts, without):
        replay.run(requests[:500], some_retention(requests[:500]))
    first, second = (list(replay._driver.manager.queries.state()) for replay in (with_ghosts, without))
    assert state_hash(first) == state_hash(second)
    assert without._driver.manager.queries.ghosts("e") is None
    with pytest.raises(UnknownExecutorError):
        without._driver.manager.queries.ghosts("nobody")
