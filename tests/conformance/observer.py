"""What a case can look at: counters, blocks, tables and events."""

from __future__ import annotations

from typing import Any

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.conformance.backends import Backend, Refused
from tests.conformance.player import EXECUTOR, Player

LEASES = (pb.EVENT_KIND_LEASE_GRANTED, pb.EVENT_KIND_LEASE_EXPIRED, pb.EVENT_KIND_LEASE_BROKEN)
EXECUTORS = (pb.EVENT_KIND_EXECUTOR_REGISTERED, pb.EVENT_KIND_EXECUTOR_LOST)
TIERS = {"device": pb.TIER_DEVICE, "host": pb.TIER_HOST, "disk": pb.TIER_DISK}


class Observer:
    """Reads a manager; `look` answers one expectation."""

    def __init__(self, backend: Backend, player: Player) -> None:
        self._backend = backend
        self._player = player
        self._read = 0
        # Keys of blocks by the name that a case gave them.
        self._keys: dict[str, bytes] = {}

    def look(self, word: str, expected: Any) -> Any:
        """The present state, in the form of the expected one."""
        return getattr(self, f"_{word}")(expected)

    # Counters

    def _pool(self, group: int = 0) -> pb.Pool:
        return self._backend.call("GetPool", pb.GetPoolRequest(pool_id=f"{EXECUTOR}/{group}")).pool

    def used(self) -> int:
        """Blocks with references, over all groups."""
        return sum(self._pool(group).used_blocks for group in range(len(self._player.pools)))

    def _free(self, expected: int | list[int]) -> int | list[int]:
        free = [self._pool(group).free_blocks for group in range(len(self._player.pools))]
        return free if isinstance(expected, list) else min(free)

    def _counters(self, expected: dict[str, int]) -> dict[str, int]:
        pool = self._pool()
        return {name: getattr(pool, name) for name in expected}

    def _host(self, expected: dict[str, int]) -> dict[str, int]:
        tiers = [tier for tier in self._pool().lower_tiers if tier.tier == pb.TIER_HOST]
        assert tiers, "there is no host tier"
        return {name: getattr(tiers[0], name) for name in expected}

    def _allocated(self, _: int) -> int:
        answer = self._backend.call("GetStats", pb.GetStatsRequest(pool_id=f"{EXECUTOR}/0"))
        return answer.tiers[0].allocated_blocks

    # Blocks

    def _listed_blocks(self) -> list[pb.Block]:
        request = pb.ListBlocksRequest(pool_id=f"{EXECUTOR}/0", page_size=1000)
        return list(self._backend.call("ListBlocks", request).blocks)

    def _priorities(self, _: list[int]) -> list[int]:
        """Of all indexed blocks, the first of a chain first."""
        indexed = [block for block in self._listed_blocks() if block.key]
        return [block.retention_priority for block in sorted(indexed, key=lambda block: (block.depth, block.slot))]

    def _priority_of(self, expected: dict[str, int]) -> dict[str, int]:
        """Of the first block of sequences that hold it."""
        by_slot = {block.slot: block for block in self._listed_blocks()}
        return {name: by_slot[self._slot(name, 0)].retention_priority for name in expected}

    def _absent_slots(self, slots: list[int]) -> list[int]:
        there = {block.slot for block in self._listed_blocks()}
        return [slot for slot in slots if slot not in there]

    def _chain(self, expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All indexed blocks by depth."""
        indexed = sorted((block for block in self._listed_blocks() if block.key), key=lambda block: block.depth)
        assert len(indexed) == len(expected), f"{len(indexed)} blocks"
        return [self._facts(block, wanted) for block, wanted in zip(indexed, expected, strict=True)]

    # Tables

    def _slot(self, name: str, place: int) -> int:
        return self._player.sequences[name].tables[0][place]

    def _listed(self, expected: dict[str, int]) -> dict[str, int]:
        return {name: len(self._player.sequences[name].tables[0]) for name in expected}

    def _same_block(self, pairs: list[list[Any]]) -> list[list[Any]]:
        """Pairs of [sequence, table index] with one block."""
        return [pair for pair in pairs if self._slot(*pair[0]) == self._slot(*pair[1])]

    def _distinct_blocks(self, places: list[list[Any]]) -> list[list[Any]]:
        slots = [self._slot(*place) for place in places]
        return places if len(set(slots)) == len(slots) else []

    # Events

    def read_events(self) -> list[pb.Event]:
        """The events since the last read; their numbers have no gap."""
        found = self._backend.events(self._read)
        assert [event.event_number for event in found] == [self._read + 1 + index for index in range(len(found))]
        self._read += len(found)
        return found

    def _events(self, expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All new events except those about leases and executors."""
        found = [event for event in self.read_events() if event.kind not in LEASES + EXECUTORS]
        told = [f"{pb.EventKind.Name(event.kind)} {event.block.pool_id} depth {event.block.depth}" for event in found]
        assert len(found) == len(expected), f"events: {told}"
        return [self._event_facts(event, wanted) for event, wanted in zip(found, expected, strict=True)]

    def _lost_events(self, kept: int) -> int:
        """Returns `kept` if all events but this number are dropped; the kept events can be read afterwards."""
        with pytest.raises(Refused) as refused:
            self._backend.events(self._read)
        assert refused.value.code == "OUT_OF_RANGE"
        last = self._backend.events(None)[0].event_number
        assert len(self._backend.events(last - kept)) == kept
        self._read = last - kept
        return kept

    def _event_facts(self, event: pb.Event, wanted: dict[str, Any]) -> dict[str, Any]:
        facts = {"event": pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower()}
        if "cause" in wanted:
            facts["cause"] = pb.RemovalCause.Name(event.removal_cause).removeprefix("REMOVAL_CAUSE_").lower()
        if "for" in wanted:
            facts["for"] = event.for_sequence_id
        return facts | self._facts(event.block, {key: wanted[key] for key in wanted if key not in facts})

    def _facts(self, block: pb.Block, wanted: dict[str, Any]) -> dict[str, Any]:
        """The facts of a block that are wanted. "as" names it, "key" and "parent" compare it with named ones."""
        facts: dict[str, Any] = {}
        for key, value in wanted.items():
            if key == "as":
                self._keys[value] = block.key
                facts[key] = value
            elif key in ("key", "parent"):
                found = block.key if key == "key" else block.parent_key
                named = b"" if value is None else self._keys[value]
                facts[key] = value if found == named else found.hex()
            elif key == "tokens":
                facts[key] = block.num_tokens
            elif key == "priority":
                facts[key] = block.retention_priority
            elif key == "adapter":
                facts[key] = block.adapter_id if block.HasField("adapter_id") else None
            elif key == "group":
                facts[key] = int(block.pool_id.rpartition("/")[2])
            elif key == "tier":
                facts[key] = next((name for name, tier in TIERS.items() if tier == block.tier), None)
            else:
                facts[key] = getattr(block, key)
        return facts
