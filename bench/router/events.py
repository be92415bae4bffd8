"""Costs of events: for the cache manager, which sends them in three ways, and for the router that receives them.

A real cache manager serves prompts at a steady rate. Each prompt stores as many blocks as it evicts, so that 5,000
events come in a second. The cost of a watcher is the manager's processor time with the watcher less the time without.
A manager that publishes over ZeroMQ is compared with a plain manager, and a manager that writes the index by key is
compared with a manager that only copies its blocks to Redis, in turns.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Self

import grpc
import zmq

from bench.router.caching import CachingManager, caching_manager
from bench.router.made import KEYS_OF_A_MESSAGE, Caches, other_keys, registered
from bench.scale.row import Row
from bench.scale.stalls import BLOCK, Cache
from cachemgr.rpc import key_events
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from scheduler.router.view import ShardView
from tests.support.ports import free_address

ENGINES, RATE, SECONDS, ROUNDS = 16, 5_000, 5.0, 9
PROMPT_BLOCKS = 50
# Blocks of each engine: a few prompts fill them, then each new prompt evicts as much as it stores.
POOL_BLOCKS = 10 * PROMPT_BLOCKS
TARGET_US = 5.0
MADE = 50_000


def rows(blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    events_port, replays_port = free_address(), free_address()
    with ExitStack() as exits:

        def full(**settings: Any) -> tuple[CachingManager, Iterator[int]]:
            """A cache manager that has to evict, and the numbers of its next prompts."""
            manager, numbers = exits.enter_context(caching_manager(ENGINES, POOL_BLOCKS, **settings)), count()
            for _ in range(ENGINES * POOL_BLOCKS // PROMPT_BLOCKS + ENGINES):
                manager.cache(next(numbers), PROMPT_BLOCKS)
            return manager, numbers

        plain, kept, indexed = full(), full(with_redis=True), full(with_redis=True, cachemgr_key_index=1)
        published = full(cachemgr_zmq_events=events_port, cachemgr_zmq_replays=replays_port, cachemgr_zmq_token_ids=1)
        reader = exits.enter_context(Reader(events_port))
        watching, publishing, indexing, messages = list[float](), list[float](), list[float](), []
        sent, sent_events = 0, 0
        for _ in range(ROUNDS):
            alone, events = steady(*plain)
            watcher = Watcher(plain[0].events)
            watching.append((steady(*plain)[0] - alone) / events * 1e6)
            messages = watcher.stop()
            before = reader.bytes
            publishing.append((steady(*published)[0] - alone) / events * 1e6)
            sent, sent_events = sent + reader.bytes - before, sent_events + events
            copied, _ = steady(*kept)
            indexing.append((steady(*indexed)[0] - copied) / events * 1e6)
    yield from _costs(f"a watcher's cost for the cache manager, each of {RATE:,} events per second", watching)
    yield Row("of it the making of messages of 100 events", _making(), "µs")
    yield from _costs("the ZeroMQ publisher's cost, with token ids and one reader", publishing)
    yield Row("an event in ZeroMQ's messages", sent / sent_events, "bytes")
    yield from _costs("the cost of the index by key in Redis", indexing)
    yield from taking(messages, blocks)


def _costs(name: str, microseconds: list[float]) -> Iterator[Row]:
    """The cost of an event in each round."""
    yield Row(name, statistics.median(microseconds), "µs", TARGET_US)
    yield Row("the same, least of all rounds", min(microseconds), "µs")
    yield Row("the same, most of all rounds", max(microseconds), "µs")


class Reader:
    """Reads the ZeroMQ messages about all executors. Use it in a with statement."""

    def __init__(self, address: str) -> None:
        """address: of the first executor."""
        host, _, port = address.partition(":")
        self.bytes = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        for number in range(ENGINES):
            self._socket.connect(f"tcp://{host}:{int(port) + number}")
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _read(self) -> None:
        while not self._is_ended.is_set():
            if self._socket.poll(100):
                self.bytes += sum(map(len, self._socket.recv_multipart()))


class Watcher:
    """Follows events from now on, as a router does, and keeps the messages."""

    def __init__(self, address: str) -> None:
        self._channel = open_sync_channel(address)
        stub: rpc.CacheEventServiceStub = rpc.CacheEventServiceStub(self._channel)
        self._call = stub.WatchEvents(pb.WatchEventsRequest(keys_only=True))
        self._messages: list[pb.WatchEventsResponse] = []
        self._complete = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self._complete.wait(30)

    def _read(self) -> None:
        try:
            for message in self._call:
                self._messages.append(message)
                if message.snapshot_end:
                    self._complete.set()
        except grpc.RpcError:
            # The call was cancelled.
            return

    def stop(self) -> list[pb.WatchEventsResponse]:
        """The messages after the snapshot, including the message that ends the snapshot."""
        self._call.cancel()
        self._thread.join()
        self._channel.close()
        end = next(number for number, message in enumerate(self._messages) if message.snapshot_end)
        return self._messages[end:]


def steady(manager: CachingManager, numbers: Iterator[int], rate: int = RATE) -> tuple[float, int]:
    """Processor time of the cache manager while prompts cause `rate` events in a second, and the number of events."""
    events, before, begun = 0, manager.processor(), time.monotonic()
    while events < rate * SECONDS:
        manager.cache(next(numbers), PROMPT_BLOCKS)
        events += 2 * PROMPT_BLOCKS
        time.sleep(max(0.0, begun + events / rate - time.monotonic()))
    return manager.processor() - before, events


def _making() -> float:
    """Process time in microseconds to make an event's part of a message."""
    cache = Cache(MADE)
    begin = cache.manager.queries.last_event
    for number in range(MADE // PROMPT_BLOCKS):
        cache.run(number * PROMPT_BLOCKS * BLOCK, PROMPT_BLOCKS * BLOCK)
    events = cache.manager.queries.events_after(begin, MADE)
    begun = time.process_time()
    for first in range(0, len(events), 100):
        changes = key_events.changes(events[first : first + 100])
        pb.WatchEventsResponse(manager_epoch=1, changes=changes, last_event_number=first).SerializeToString()
    return (time.process_time() - begun) / len(events) * 1e6


def taking(messages: list[pb.WatchEventsResponse], blocks: int, engines: int = ENGINES) -> Iterator[Row]:
    """The cost of the messages for a router whose view has `blocks` further blocks."""
    caches = Caches(engines)
    for engine in range(engines):
        caches.store(engine, 1, other_keys(engine, blocks // engines))
    shard_view = ShardView("another")
    caches.view.apply(shard_view, [registered(f"e{engine}") for engine in range(engines)])
    events = messages[-1].last_event_number - messages[0].last_event_number
    sent = [message.SerializeToString() for message in messages[1:]]
    begun = time.process_time()
    for data in sent:
        caches.view.apply(shard_view, pb.WatchEventsResponse.FromString(data).changes)
    taken = time.process_time() - begun
    yield Row("taking an event in, for the router", taken / events * 1e6, "µs")
    yield Row("an event over the network", sum(map(len, sent)) / events, "bytes")
    yield Row("events in a message", events / len(sent), "events")
    keys = other_keys(-1, 100 * KEYS_OF_A_MESSAGE)
    begun = time.process_time()
    caches.store(0, 1, keys)
    yield Row("taking a block of a snapshot in, for the router", (time.process_time() - begun) / len(keys) * 1e6, "µs")
