"""A simulated world in which sequences evict tokens: their scheduler asks for blocks, their device moves them."""

import dataclasses

from cachemgr.types import SyncAnswer, SyncRequest
from protos.kvcache.eviction_request import EvictionPolicyRequest
from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.unit.cachemgr.live import BLOCK, Live
from tests.unit.cachemgr.world import World


def asked(kind: str, **fields: object) -> EvictionPolicyRequest:
    """A policy as a request asks for it, by the name of its kind."""
    return EvictionPolicyRequest.of(pb.EvictionPolicy(kind=f"EVICTION_KIND_{kind}", **fields))


# Of every way in which lengths go, small enough for prompts of a few blocks.
POLICIES = [
    asked("SLIDING_WINDOW", start_tokens=1, recent_tokens=6),
    asked("AVERAGE", max_cache_tokens=6, period_tokens=2, during_prefill=True),
    asked("H2O", max_cache_tokens=8, period_tokens=2),
    asked("SNAPKV", max_cache_tokens=5, recent_tokens=2, score_window_tokens=2),
    asked("LAST", max_cache_tokens=5),
    asked("NORM_SUM", start_tokens=4, recent_tokens=4, max_cache_tokens=12),
    asked("RANDOM", max_cache_tokens=6, start_tokens=1, recent_tokens=2, period_tokens=2, during_prefill=True),
    asked("KEYDIFF", max_cache_tokens=7, start_tokens=1, recent_tokens=2, period_tokens=3),
]


class EvictingWorld(World):
    """Besides what World does it evicts by the admitted policies.

    What a sequence keeps or computes once it has moved is its own mark: whoever else finds it, or writes over it, is
    noticed.
    """

    # The device

    def stays(self, live: Live) -> int:
        """Tokens that are kept when it computes more."""
        assert live.policy is not None
        return live.policy.kept_after(live.kept, live.computed, live.prompt)

    def must_move(self, live: Live) -> bool:
        return live.policy is not None and not live.moved and self.stays(live) < live.kept

    def room(self, live: Live) -> int:
        if live.policy is None:
            return super().room(live)
        if self.must_move(live) and live.granted is None:
            return 0
        kept = self.stays(live)
        slots = len(live.granted) * BLOCK if self.must_move(live) and live.granted else live.capacity
        left = min(len(live.tokens) - live.computed, slots - kept)
        room = live.policy.room(kept, live.computed, live.prompt)
        return left if room is None else min(left, room)

    def write(self, live: Live, count: int) -> None:
        if live.policy is not None:
            self.evict(live)
        if not live.moved:
            super().write(live, count)
            return
        self.mark(live, live.kept, live.kept + count)

    def evict(self, live: Live) -> None:
        kept, first = self.stays(live), self.must_move(live)
        if kept == live.kept:
            return
        if first:
            assert live.granted is not None
            assert live.policy is not None
            live.moved, live.clean = True, live.computed
            most = live.policy.most_kept
            own = live.tables[0][: None if most is None else -(-most // BLOCK)]
            live.tables = [list(live.granted) or own]
        live.evicted = live.computed - kept
        self.mark(live, 0, kept)

    def mark(self, live: Live, start: int, end: int) -> None:
        for place in range(start, end):
            slot = live.tables[0][place // BLOCK]
            self.written[0, slot] = self.step_number
            self.memory[0, slot, place % BLOCK] = ("kept by", live.handle)

    def attend(self, live: Live, count: int) -> None:
        if not live.moved:
            super().attend(live, count)
            return
        for place in range(live.kept + count):
            held = self.memory.get((0, live.tables[0][place // BLOCK], place % BLOCK))
            assert held == ("kept by", live.handle), f"slot {place} of {live.handle} holds {held}"

    # The scheduler

    def next_sync(self, names: set[str] | None = None) -> SyncRequest:
        told = [live for name, live in self.live.items() if names is None or name in names] + self.leaving
        asking = [live.handle for live in told if live not in self.leaving and self.must_move(live)]
        moved = [live for live in told if live.clean is not None]
        columns = {
            "evicting_handles": asking,
            "moved_handles": [live.handle for live in moved],
            "moved_computed_tokens": [live.clean for live in moved],
        }
        for live in moved:
            live.clean = None
        return dataclasses.replace(super().next_sync(names), **columns)

    def compute(self, live: Live, length: int) -> None:
        """As in World; syncs whenever nothing can be computed, which must help."""
        name = live.request.sequence_id
        while live.computed < length:
            before = live.computed
            for _ in range(2):
                self.step(min(5, length - live.computed), names={name})
                self.confirm()
                if live.computed > before:
                    break
                self.sync({name})
            else:
                raise AssertionError(f"{name} is stuck behind {before} tokens")

    def take(self, answer: SyncAnswer) -> None:
        by_handle = {live.handle: live for live in self.live.values()}
        for handle in answer.extended_handles:
            assert by_handle[handle].clean is None, "a table grows that the sequence has left"
        super().take(answer)
        at = 0
        for handle, count in zip(answer.evicting_handles, answer.evicting_counts, strict=True):
            slots = answer.evicting_slots[at : at + count]
            at += count
            live = by_handle[handle]
            assert live.granted in (None, slots)
            live.granted = slots
