"""Events for routers over ZeroMQ, read by one that knows vLLM's messages only."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from cachemgr.blocks.events import Event
from cachemgr.process import CacheManagerProcess
from cachemgr.rpc import vllm_event_publisher
from cachemgr.rpc.vllm_event_messages import salt_name
from cachemgr.rpc.vllm_event_publisher import ZmqSettings
from cachemgr.sequences import release
from cachemgr.settings import CachemgrSettings
from cachemgr.slices import at_once
from cachemgr.types import EventKind, ExecutorSpec, ExtraKey, ForgetTarget, ManagerConfig, PoolSpec, TierKind
from protos.rpc.settings import SettingsError, load
from tests.support.cachemgr_client import BLOCK_SIZE, Client, settings_for
from tests.support.in_process_manager import BLOCK, FINGERPRINT, PATIENT, World
from tests.support.patience import patience
from tests.support.ports import free_addresses
from tests.support.random_operations import RandomLife
from tests.support.zmq_reader import AllBlocksCleared, BlockRemoved, BlockStored, Publishing, RouterView, truth

TOKENS = list(range(100, 100 + 3 * BLOCK))


class Published:
    """A world whose blocks are published, and readers of them."""

    def __init__(self, **settings: object) -> None:
        self.events, self.replays = free_addresses(2)
        self.settings = ZmqSettings(self.events, self.replays, **settings)
        self.publishing: list[Publishing] = []

    async def publish(self, world: World) -> Publishing:
        """The process of a manager starts; that of the manager before has ended."""
        for before in self.publishing[-1:]:
            await before.stop()
        self.publishing.append(Publishing(world.queries, self.settings, time.time_ns()))
        return self.publishing[-1]

    def reader(self) -> RouterView:
        return RouterView(self.events, self.replays)

    @property
    def stream(self) -> vllm_event_publisher.Stream:
        return self.publishing[-1].zmq._streams[0]

    @contextlib.contextmanager
    def asking(self, name: bytes) -> Iterator[zmq.asyncio.Socket]:
        """A socket that asks for replays under a name."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.identity = name
            socket.connect(f"tcp://{self.replays}")
            yield socket

    async def quiet(self, world: World, *views: RouterView) -> None:
        """All that happened is published, and readers come to know it, without further news."""
        self.publishing[-1].feed.notify()
        for view in views:
            await view.until(truth(world.manager, token_ids=self.settings.token_ids))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """New readers need not wait long."""
    monkeypatch.setattr(vllm_event_publisher, "BEAT_SECONDS", 0.02)


@pytest.fixture
async def published(request: pytest.FixtureRequest) -> AsyncIterator[Published]:
    found = Published(**getattr(request, "param", {}))
    yield found
    for one in found.publishing[-1:]:
        await one.stop()


with_tokens = pytest.mark.parametrize(
    "published", [{"token_ids": True, "topic": "kv@{executor_id}@{model}"}], indirect=True
)


@with_tokens
async def test_the_messages_are_those_of_vllm(published: Published) -> None:
    world = World(host_blocks=4, config=PATIENT)
    await published.publish(world)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as reader:
        reader.connect(f"tcp://{published.events}")
        reader.subscribe(b"kv@e@m")
        # The first batch that comes is a beat, unless the socket is there before all events.
        topic, first, _ = await reader.recv_multipart()
        world.cache(TOKENS, salt="acme", adapter_id=3, extra_keys=(ExtraKey(2, 4, b"\1" * 32),))
        published.publishing[-1].feed.notify()
        last, events = int.from_bytes(first, "big"), []
        # There may be more beats before it; they count, too.
        while not events:
            _, number, message = await reader.recv_multipart()
            last += 1
            assert int.from_bytes(number, "big") == last
            stamp, events, rank = msgspec.msgpack.decode(message)
    assert topic == b"kv@e@m"
    assert stamp == pytest.approx(time.time(), abs=3600)
    assert rank is None
    keys = [view.key for _, view in filter(None, world.queries.blocks("e/0")) if view.num_tokens == BLOCK]
    (stored,) = [event for event in events if event["type"] == "BlockStored"]
    digest, salt = "01" * 32, f"dynamo-cache-salt:{sha256(b'acme').hexdigest()[:16]}"
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(key[:8], "little") for key in keys],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": BLOCK,
        "lora_id": 3,
        "medium": "GPU",
        "lora_name": "3",
        "extra_keys": [["3", [digest, 2], salt], ["3", [digest, -2], salt], ["3", salt]],
    }


async def test_token_ids_stay_here_unless_the_setting_says_otherwise(published: Published) -> None:
    world = World(config=PATIENT)
    await published.publish(world)
    async with published.reader().following() as view:
        world.cache(TOKENS)
        await published.quiet(world, view)
    stored = [event for event in view.events if isinstance(event, BlockStored)]
    assert stored
    assert all(event.token_ids == [] for event in stored)


def test_a_salt_is_sent_as_it_is_only_if_a_router_made_it() -> None:
    assert salt_name("dynamo-cache-salt:tenant") == "dynamo-cache-salt:tenant"
    # The router reads a name with nothing after it as no salt at all.
    for salt in ("acme", "dynamo-cache-salt:", "Dynamo-cache-salt:x"):
        assert salt_name(salt) == f"dynamo-cache-salt:{sha256(salt.encode()).hexdigest()[:16]}"


async def test_a_new_reader_gets_all_there_was_and_one_that_missed_some_gets_those(published: Published) -> None:
    world = World(num_blocks=24, config=PATIENT)
    await published.publish(world)
    world.cache(TOKENS)
    view = published.reader()
    async with view.following():
        await published.quiet(world, view)
    # The number before the first one is 0 for readers: it asks for all.
    assert view.asked == [0]
    last = view.last
    for first in (300, 400, 500):
        world.cache(list(range(first, first + 2 * BLOCK)))
        await published.quiet(world)
        await asyncio.sleep(0.01)
    view.replayed.clear()
    async with view.following():
        await published.quiet(world, view)
    assert view.asked == [0, last + 1]
    assert view.replayed[:3] == list(range(last + 1, last + 4))
    assert len(view.index) == 9


@with_tokens
async def test_what_is_not_kept_any_more_is_replaced_by_all_that_is_there(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_event_publisher, "KEPT_BYTES", 1000)
    monkeypatch.setattr(vllm_event_publisher, "_MAX_BLOCKS", 4)
    world = World(num_blocks=40, host_blocks=10, config=PATIENT)
    await published.publish(world)
    async with published.reader().following() as view:
        published.publishing[-1].feed.notify()
        await view.until({}, behind=-1)
    for first in range(300, 1500, 100):
        world.cache(list(range(first, first + 4 * BLOCK)))
        await published.quiet(world)
        await asyncio.sleep(0.01)
    async with view.following():
        await published.quiet(world, view)
    assert world.tiers()["host"]
    newest = view.replayed[-1]
    # It begins with nothing, and the last batch is the one before those that come next.
    count = 1 + -(-len(view.index) // 4)
    assert view.replayed[-count:] == list(range(newest - count + 1, newest + 1))
    assert sum(isinstance(event, AllBlocksCleared) for event in view.events) == 2
    assert published.stream._kept_bytes <= 1000


@with_tokens
@pytest.mark.parametrize("seed", range(16))
async def test_whatever_happens_readers_come_to_know_what_is_there(
    published: Published, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        # Late readers get the present blocks, not the earlier events.
        monkeypatch.setattr(vllm_event_publisher, "KEPT_BYTES", 300)
    # Of the events 50 are kept: mostly it follows them, and now and then it must begin again.
    life = RandomLife(seed)
    world, manager = life.world, None
    random = Random(seed)
    view, late = published.reader(), published.reader()
    async with view.following():
        for _ in range(25):
            if world.manager is not manager:
                manager = world.manager
                await published.publish(world)
            if random.random() < 0.3:
                # Batches that one of the readers misses.
                for _ in range(10):
                    life.operate()
                    if world.manager is manager:
                        published.publishing[-1].feed.notify()
                        await asyncio.sleep(0.001)
            else:
                for _ in range(random.choice([5, 60])):
                    life.operate()
            if world.manager is manager:
                await published.quiet(world, view)
            if world.manager is manager and random.random() < 0.3:
                async with late.following():
                    await published.quiet(world, late)
        if world.manager is not manager:
            await published.publish(world)
        async with late.following():
            await published.quiet(world, view, late)


@pytest.mark.parametrize("most_reported", [0, 100])
async def test_a_lost_executor_has_nothing_and_one_that_starts_again_begins_with_nothing(
    published: Published, most_reported: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lost blocks have separate events only if they are few.
    monkeypatch.setattr(release, "MOST_REPORTED", most_reported)
    world = World()
    await published.publish(world)
    async with published.reader().following() as view:
        world.cache(TOKENS)
        await published.quiet(world, view)
        assert view.index
        world.now += 100
        world.manager.expire()
        assert not world.queries.knows_executor("e")
        await published.quiet(world, view)
        assert isinstance(view.events[-1], AllBlocksCleared)
        assert not view.index
        world.start_scheduler()
        world.start_executor()
        world.cache(TOKENS)
        await published.quiet(world, view)
        assert len(view.index) == 3
    kinds = [type(event) for event in view.events]
    assert kinds.count(AllBlocksCleared) == 3


async def test_so_has_an_executor_that_is_lost_with_more_events_than_are_kept(published: Published) -> None:
    world = World(config=ManagerConfig(lease_seconds=10, event_history=2))
    await published.publish(world)
    async with published.reader().following() as view:
        world.cache(TOKENS)
        await published.quiet(world, view)
        assert len(view.index) == 3
        world.now += 100
        world.manager.expire()
        await published.quiet(world, view)
    assert not view.index


async def test_only_the_first_group_with_full_attention_is_published(published: Published) -> None:
    world = World(16, windows=(6, None, None), config=PATIENT)
    await published.publish(world)
    async with published.reader().following() as view:
        world.cache(TOKENS)
        await published.quiet(world, view)
        assert len(view.index) == 3
    hashes = [one for event in view.events if isinstance(event, BlockStored) for one in event.block_hashes]
    assert len(hashes) == 3
    assert published.stream.pool_id == "e/1"


async def test_of_windows_alone_nothing_is_published(published: Published) -> None:
    world = World(16, windows=(6,), config=PATIENT)
    publishing = await published.publish(world)
    world.cache(TOKENS)
    await published.quiet(world)
    await asyncio.sleep(0.01)  # subject: nothing is published meanwhile
    assert publishing.zmq._streams == {}


async def test_a_block_that_moves_leaves_one_medium_for_another(published: Published) -> None:
    world = World(num_blocks=4, host_blocks=8, config=PATIENT)
    await published.publish(world)
    async with published.reader().following() as view:
        world.cache(TOKENS)
        await published.quiet(world, view)
        before = dict(view.index)
        assert {known.medium for known in before.values()} == {"GPU"}
        world.cache(list(range(900, 900 + 4 * BLOCK)))
        await published.quiet(world, view)
        assert {view.index[one].medium for one in before} == {"CPU"}
    left = [event for event in view.events if isinstance(event, BlockRemoved)]
    assert {event.medium for event in left} == {"GPU"}


async def test_new_readers_hear_of_the_parents_of_device_blocks_first(published: Published) -> None:
    world = World(config=PATIENT)
    await published.publish(world)
    world.cache(TOKENS[: 2 * BLOCK])
    async with published.reader().following() as view:
        await published.quiet(world, view)
    stream = published.stream
    parent, child = (view for _, view in filter(None, world.queries.blocks("e/0")) if view.num_tokens == BLOCK)
    stream.clear()
    # As if lower tiers have outlived the device: the child waits there for its parent.
    below = child._replace(tier=TierKind.HOST)
    for number, (kind, block) in enumerate(
        [(EventKind.STORED, below), (EventKind.STORED, parent), (EventKind.UPDATED, child)]
    ):
        stream.note(Event(number, kind, block))
    assert list(stream.known) == [parent.key, child.key]


async def test_a_reader_that_stops_reading_costs_no_more_than_its_bound(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_event_publisher, "WAITING_BATCHES", 2)
    monkeypatch.setattr(vllm_event_publisher, "KEPT_BYTES", 1 << 14)
    published.settings = ZmqSettings(published.events, published.replays, "t" * 60_000)
    world = World(num_blocks=64, config=PATIENT)
    await published.publish(world)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.rcvhwm = 1
        stuck.rcvbuf = 4096
        stuck.connect(f"tcp://{published.events}")
        stuck.subscribe(b"")
        await stuck.recv_multipart()
        # Many times the buffers of both sides.
        for first in range(1000, 5000, 10):
            world.cache(list(range(first, first + BLOCK)))
            published.publishing[-1].feed.notify()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await published.quiet(world)
        async with published.reader().following() as view:
            await published.quiet(world, view)
        assert published.stream._kept_bytes <= 1 << 14
        # What it finds when it reads again has a gap.
        numbers = []
        while not numbers or numbers[-1] < view.last:
            _, number, _ = await asyncio.wait_for(stuck.recv_multipart(), patience(20))
            numbers.append(int.from_bytes(number, "big"))
    assert any(behind > before + 1 for before, behind in itertools.pairwise(numbers))


@with_tokens
async def test_forgotten_prompts_are_in_no_later_replay(published: Published) -> None:
    world = World(num_blocks=24, config=PATIENT)
    await published.publish(world)
    marked = [77_777] * BLOCK + TOKENS
    world.cache(marked, salt="a")
    world.cache(TOKENS)
    async with published.reader().following() as view:
        await published.quiet(world, view)
        code = msgspec.msgpack.encode(77_777)
        assert any(code in message for message in published.stream._kept)
        # Also of blocks that were evicted before.
        world.fill()
        world.finish("fill100")
        await published.quiet(world, view)
        at_once(world.operators.forget(ForgetTarget(salt="a"), validate_only=False))
        await published.quiet(world)
        async with asyncio.timeout(patience(20)):
            while any(code in message for message in published.stream._kept):
                await asyncio.sleep(0.01)
    late = published.reader()
    async with late.following():
        await published.quiet(world, late)
    assert all(77_777 not in event.token_ids for event in late.events if isinstance(event, BlockStored))


async def test_a_request_that_is_none_gets_no_answer_and_ends_nothing(published: Published) -> None:
    world = World(config=PATIENT)
    await published.publish(world)
    world.cache(TOKENS)
    view = published.reader()
    async with view.following():
        await published.quiet(world, view)
    before = refused("malformed")
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(f"tcp://{published.replays}")
        for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(8), b""]):
            await asking.send_multipart(frames)
        # No batch follows the newest batch.
        await asking.send_multipart([b"", (published.stream.last + 10**9).to_bytes(8, "big")])
        assert await asyncio.wait_for(asking.recv_multipart(), patience(20)) == [b"", b"\xff" * 8, b""]
        assert refused("malformed") == before + 5


@pytest.mark.parametrize("number", [1 << 62, 1 << 63, (1 << 63) + 5, (1 << 64) - 1])
async def test_whatever_number_is_asked_for_the_manager_goes_on(published: Published, number: int) -> None:
    world = World(config=PATIENT)
    await published.publish(world)
    world.cache(TOKENS)
    async with published.reader().following() as view:
        await published.quiet(world, view)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(f"tcp://{published.replays}")
        await asking.send_multipart([b"", number.to_bytes(8, "big")])
        assert await asyncio.wait_for(asking.recv_multipart(), patience(20)) == [b"", b"\xff" * 8, b""]
        await asking.send_multipart([b"", bytes(8)])
        assert await replay(asking)


async def test_a_replay_that_fails_is_counted_and_others_are_answered(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(config=PATIENT)
    await published.publish(world)
    world.cache(TOKENS)
    async with published.reader().following() as view:
        await published.quiet(world, view)
    kept_from = vllm_event_publisher.Stream.kept_from

    def fails_once(self: vllm_event_publisher.Stream, number: int) -> list[tuple[int, bytes]] | None:
        monkeypatch.setattr(vllm_event_publisher.Stream, "kept_from", kept_from)
        raise ZeroDivisionError

    monkeypatch.setattr(vllm_event_publisher.Stream, "kept_from", fails_once)
    before = refused("failed")
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking, capture_logs() as logs:
        asking.connect(f"tcp://{published.replays}")
        for _ in range(2):
            await asking.send_multipart([b"", bytes(8)])
        assert await replay(asking)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["a replay failed"]
    assert refused("failed") == before + 1


@pytest.mark.parametrize("bound", ["_SHORT_PATIENCE_SECONDS", "_SHARED_SECONDS"])
async def test_readers_that_take_little_do_not_keep_others_from_their_replays(
    published: Published, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Patiently waits for each reader, for longer than this test lasts, unless other readers wait."""
    for name in ("_PATIENCE_SECONDS", "_SHORT_PATIENCE_SECONDS", "_SHARED_SECONDS"):
        # A reader that reads at once takes less also on a busy machine.
        monkeypatch.setattr(vllm_event_publisher, name, 0.5 if name == bound else 1e6)
    monkeypatch.setattr(vllm_event_publisher, "_MOST_REPLAYS", 8)
    monkeypatch.setattr(vllm_event_publisher, "WAITING_BATCHES", 1)
    # More than all buffers between two processes hold.
    large = [(number, bytes(1_000_000)) for number in range(20)]
    monkeypatch.setattr(
        vllm_event_publisher.Stream, "kept_from", lambda self, number: large if number else [(number, b"a batch")]
    )
    world = World(config=PATIENT)
    await published.publish(world)
    async with published.reader().following() as view:
        await published.quiet(world, view)
    with zmq.asyncio.Context() as context, contextlib.ExitStack() as sockets:
        stuck = [sockets.enter_context(context.socket(zmq.DEALER)) for _ in range(30)]
        for asking in stuck:
            asking.rcvhwm, asking.rcvbuf = 1, 4096
            asking.connect(f"tcp://{published.replays}")
            await asking.send_multipart([b"", bytes(7) + b"\1"])
        good = sockets.enter_context(context.socket(zmq.DEALER))
        good.connect(f"tcp://{published.replays}")
        for _ in range(3):
            await good.send_multipart([b"", bytes(8)])
        for _ in range(3):
            assert await replay(good) == [0]


async def test_the_end_of_a_replay_is_sent_once_also_when_the_process_ends_behind_it(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that asks again would take a second end for its answer, and each later answer for the one before."""
    world = World(config=PATIENT)
    publishing = await published.publish(world)
    world.cache(TOKENS)
    async with published.reader().following() as view:
        await published.quiet(world, view)
    sleep, stopping = asyncio.sleep, asyncio.Event()

    async def stop_behind_the_end(seconds: float) -> None:
        # The publisher gives other tasks their turn after every message of a replay.
        if not published.stream.asked.get(name, True):
            stopping.set()
            await asyncio.Event().wait()
        await sleep(seconds)

    with published.asking(name := b"reader") as asking:
        monkeypatch.setattr(asyncio, "sleep", stop_behind_the_end)
        await asking.send_multipart([b"", bytes(8)])
        await asyncio.wait_for(stopping.wait(), patience(20))
        monkeypatch.undo()
        await publishing.stop()
        published.publishing.clear()
        assert await replay(asking)
        assert not await asking.poll(200)


async def test_a_reader_may_ask_again_while_the_end_of_its_replay_is_sent(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    await published.publish(World(config=PATIENT))
    async with published.reader().following():
        await asyncio.sleep(0)
    sleep, asked = asyncio.sleep, 0

    async def ask_behind_the_end(seconds: float) -> None:
        # The publisher gives other tasks their turn after every message of a replay.
        nonlocal asked
        if asked < 3 and published.stream.asked.get(name) == deque():
            asked += 1
            await asking.send_multipart([b"", bytes(8)])
            while not published.stream.asked[name]:
                await sleep(0.001)
        await sleep(seconds)

    with published.asking(name := b"reader") as asking:
        monkeypatch.setattr(asyncio, "sleep", ask_behind_the_end)
        await asking.send_multipart([b"", bytes(8)])
        for _ in range(4):
            await replay(asking)
        monkeypatch.undo()
        assert asked == 3
        assert not await asking.poll(200)
    assert published.stream.asked == {}


async def replay(asking: zmq.asyncio.Socket) -> list[int]:
    """The numbers of the batches of one replay."""
    numbers = []
    async with asyncio.timeout(patience(20)):
        while True:
            _, number, _ = await asking.recv_multipart()
            if number == b"\xff" * 8:
                return numbers
            numbers.append(int.from_bytes(number, "big"))


def refused(cause: str) -> float:
    """Messages that asked for no replay so far."""
    return vllm_event_publisher.REFUSED.labels(cause)._value.get()


async def test_a_replay_ends_also_when_the_process_does(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_event_publisher, "WAITING_BATCHES", 1000)
    monkeypatch.setattr(vllm_event_publisher, "_MAX_BLOCKS", 1)
    world = World(num_blocks=400, config=PATIENT)
    await published.publish(world)
    world.cache(list(range(100_000, 100_000 + 300 * BLOCK)))
    async with published.reader().following() as view:
        await published.quiet(world, view)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for asking in (first, second):
            asking.connect(f"tcp://{published.replays}")
            await asking.send_multipart([b"", bytes(8)])
        async with asyncio.timeout(patience(20)):
            while not published.stream.asked:
                await asyncio.sleep(0)
        await published.publishing[-1].stop()
        published.publishing.clear()
        for asking in (first, second):
            answers = []
            async with asyncio.timeout(patience(20)):
                while not answers or answers[-1] != b"\xff" * 8:
                    answers.append((await asking.recv_multipart())[1])
            assert len(answers) < 300


def register(world: World, executor_id: str) -> None:
    world.manager.register_executor(ExecutorSpec(executor_id, 1, "m", FINGERPRINT, BLOCK, [PoolSpec(0, 4)]))


async def test_each_executor_has_the_port_that_its_number_says(published: Published) -> None:
    world = World()
    publishing = await published.publish(world)
    async with published.reader().following() as view:
        await published.quiet(world, view)
        await view.until({}, behind=-1)
    port = int(published.events.rpartition(":")[2])
    with capture_logs() as logs:
        for name in ("gpu-7", "x-7", "far-99999999999999999999"):
            register(world, name)
        publishing.feed.notify()
        async with asyncio.timeout(patience(20)):
            while len(logs) < 3:
                await asyncio.sleep(0.001)
        assert logs[0]["addresses"][0] == f"127.0.0.1:{port + 7}"
        assert (logs[1]["executor"], logs[1]["other"]) == ("x-7", "gpu-7")
        assert logs[2]["executor"] == "far-99999999999999999999"
        assert publishing.zmq._streams[7].executor_id == "gpu-7"
        world.now += 8
        world.renew()
        world.now += 8
        world.manager.expire()
        register(world, "x-7")
        publishing.feed.notify()
        async with asyncio.timeout(patience(20)):
            while publishing.zmq._streams[7].executor_id != "x-7":
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("published", [{"topic": "{executor_id}"}], indirect=True)
async def test_readers_of_a_topic_hear_of_its_end_when_another_executor_takes_the_port(published: Published) -> None:
    world = World()
    await published.publish(world)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger = 0
        reader.connect(f"tcp://{published.events}")
        reader.subscribe(b"e")
        await reader.recv_multipart()
        world.cache(TOKENS)
        published.publishing[-1].feed.notify()
        world.now += 100
        world.manager.expire()
        # Both are published in one turn.
        register(world, "f")
        published.publishing[-1].feed.notify()
        async with asyncio.timeout(patience(20)):
            while True:
                topic, _, message = await reader.recv_multipart()
                assert topic == b"e"
                if {"type": "AllBlocksCleared"} in msgspec.msgpack.decode(message)[1]:
                    break


@pytest.fixture
def read() -> Callable[..., CachemgrSettings]:
    def read(**values: str) -> CachemgrSettings:
        return load(CachemgrSettings, {f"KVKEEP_{name.upper()}": value for name, value in values.items()})

    return read


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cachemgr_zmq_events": "10.0.0.1:5557"}, "KVKEEP_CACHEMGR_ZMQ_EVENTS: 10.0.0.1:5557 can be reached"),
        ({"cachemgr_zmq_events": "0.0.0.0:5557"}, "KVKEEP_CACHEMGR_ZMQ_EVENTS"),
        ({"cachemgr_zmq_events": "5557"}, "KVKEEP_CACHEMGR_ZMQ_EVENTS: must be host:port"),
        ({"cachemgr_zmq_events": "unix:/tmp/x"}, "KVKEEP_CACHEMGR_ZMQ_EVENTS"),
        ({"cachemgr_zmq_events": "engine.example.com:5557"}, "an IP address"),
        ({"cachemgr_zmq_events": "127.0.0.1:0"}, "a port that is not 0"),
        ({"cachemgr_zmq_replays": "127.0.0.1:5558"}, "needs KVKEEP_CACHEMGR_ZMQ_EVENTS"),
        ({"cachemgr_zmq_events": "127.0.0.1:5", "cachemgr_zmq_replays": "127.0.0.1:5"}, "are one address"),
        ({"cachemgr_zmq_events": "127.0.0.1:5", "cachemgr_zmq_replays": "10.0.0.1:5"}, "ZMQ_REPLAYS: 10.0.0.1:5"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    read: Callable[..., CachemgrSettings], values: dict[str, str], words: str
) -> None:
    with pytest.raises(SettingsError) as error:
        read(**values)
    assert words in str(error.value)


def test_other_machines_are_allowed_where_the_setting_for_it_says_so(read: Callable[..., CachemgrSettings]) -> None:
    assert read(cachemgr_zmq_events="0.0.0.0:5557", insecure="1").zmq_events == "0.0.0.0:5557"
    assert read().zmq_events == ""
    assert read(cachemgr_zmq_events="[::1]:5557").zmq_events == "[::1]:5557"


async def test_the_process_publishes_and_its_numbers_grow_over_a_restart(tmp_path: Path) -> None:
    events, replays = free_addresses(2)
    settings = settings_for(tmp_path, zmq_events=events, zmq_replays=replays)
    view = RouterView(events, replays)
    async with view.following():
        for _ in range(2):
            before = view.last
            process = CacheManagerProcess(settings)
            await process.start()
            client = Client(settings)
            try:
                await client.register()
                admitted = await client.admit("q", 40)
                await client.compute(admitted, 40)
                async with asyncio.timeout(patience(20)):
                    while len(view.index) != 40 // BLOCK_SIZE or view.last <= before:
                        await asyncio.sleep(0.001)
            finally:
                await client.close()
                await process.stop()
    # Once as a new reader, and once for the batches of the second process that it missed.
    assert len(view.asked) == 2
    assert sum(isinstance(event, AllBlocksCleared) for event in view.events) == 2
