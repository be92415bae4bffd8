"""What operators forgot or purged of executors that are away, for when their blocks and slots come back."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from cachemgr.sequences.block_chain import keys_of
from cachemgr.tokens import pack, packed_bytes
from cachemgr.types import ForgetTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cachemgr.blocks.block_record import BlockRecord
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import Slot

    IsMeant = Callable[[BlockRecord], bool]

# Targets that are kept, and tokens of their prefixes, together.
MOST_KEPT = 1 << 16
# Executors that have gone whose last call is known. Of others all targets that are kept are forgotten again.
MOST_REACHED = 1 << 14
# Slots of lost executors that are kept, all together, and lost executors whose purges are.
MOST_SLOTS = 1 << 16
MOST_PURGED = 1 << 10

# Group, tier, and number.


class ForgetHistory:
    """A target applies to all that was remembered of an executor before the call ended, and to the slots of an executor
    that was lost before it had overwritten them.

    Calls are numbered. Beyond `MOST_KEPT` the oldest targets go; of executors that have been away for longer than that
    all remembered blocks are forgotten.
    """

    def __init__(self) -> None:
        # With the number of the last call, which comes last.
        self._targets: dict[ForgetTarget, int] = {}
        self._size = 0
        self._number = 0
        self._running: set[int] = set()
        # The last call whose target has gone.
        self._dropped = 0
        # By executor: the last call that has reached all that the store remembers of it.
        self._reached: dict[str, int] = {}
        self._slots: dict[str, list[Slot]] = {}
        self._num_slots = 0
        self._purged: dict[str, list[IsMeant]] = {}

    def begin(self, target: ForgetTarget) -> int:
        """A call begins; returns its number."""
        if target.prefix is not None:
            # Of a request, they are a list.
            target = ForgetTarget(prefix=replace(target.prefix, token_ids=tuple(target.prefix.token_ids)))
        self._number += 1
        if self._targets.pop(target, None) is None:
            self._size += _size(target)
        self._targets[target] = self._number
        self._running.add(self._number)
        while self._size > MOST_KEPT:
            oldest = next(iter(self._targets))
            self._dropped = self._targets.pop(oldest)
            self._size -= _size(oldest)
        return self._number

    def end(self, number: int) -> None:
        """A call has taken its blocks out of the index of every registered executor."""
        self._running.discard(number)

    def lost(self, executor_id: str) -> None:
        """An executor is gone whose blocks were all in the index: calls that have ended need not reach them again."""
        self._reached.pop(executor_id, None)
        self._reached[executor_id] = min(self._running, default=self._number + 1) - 1
        if len(self._reached) > MOST_REACHED:
            del self._reached[next(iter(self._reached))]

    def not_overwritten(self, executor_id: str, slots: Iterable[Slot]) -> None:
        """An executor is gone before these slots were overwritten. Beyond `MOST_SLOTS` those of the oldest loss go."""
        known = self._slots.pop(executor_id, [])
        # One that is lost again in its recovery.
        found = list(dict.fromkeys(chain(islice(slots, MOST_SLOTS), known)))[:MOST_SLOTS]
        self._num_slots += len(found) - len(known)
        if found:
            self._slots[executor_id] = found
        while self._num_slots > MOST_SLOTS:
            self._num_slots -= len(self._slots.pop(next(iter(self._slots))))

    def lost_in_recovery(self, executor_id: str, purged: list[IsMeant]) -> None:
        """An executor is gone before all that was purged was read."""
        if purged:
            self._purged[executor_id] = purged
        if len(self._purged) > MOST_PURGED:
            del self._purged[next(iter(self._purged))]

    def purged(self, executor_id: str) -> list[IsMeant]:
        """What was purged of an executor that comes back; it is told once."""
        return self._purged.pop(executor_id, [])

    def to_overwrite(self, executor_id: str) -> list[Slot]:
        """Slots of an executor that comes back; they are told once."""
        found = self._slots.pop(executor_id, [])
        self._num_slots -= len(found)
        return found

    def of(self, executor: Executor) -> ForgottenBefore:
        """What the targets mean of the remembered blocks of an executor that registers."""
        reached = self._reached.get(executor.executor_id, 0)
        found = ForgottenBefore(executor, everything=reached < self._dropped)
        for target, number in self._targets.items():
            if number > reached:
                found.add(target)
        return found


class ForgottenBefore:
    """Which remembered blocks of an executor are to be forgotten, those behind them aside.

    A session's go also where another session stands on them: nothing is known of the blocks that are yet to be read.
    """

    def __init__(self, executor: Executor, *, everything: bool = False) -> None:
        self._executor = executor
        self._everything = everything
        self._salts: set[str] = set()
        self._sessions: set[str] = set()
        self._keys: set[bytes] = set()
        # Prompts of less than a block, by salt and adapter.
        self._beginnings: dict[tuple[str | None, int | None], list[bytes]] = {}

    def add(self, target: ForgetTarget) -> None:
        """One more target; it may mean another executor."""
        prefix = target.prefix
        if target.salt is not None:
            self._salts.add(target.salt)
        elif target.session_id is not None:
            self._sessions.add(target.session_id)
        elif prefix is not None and prefix.executor_id in ("", self._executor.executor_id):
            keys = keys_of(self._executor, prefix)
            self._keys.update(keys)
            if not keys:
                tokens = packed_bytes(pack(prefix.token_ids))
                self._beginnings.setdefault((prefix.salt, prefix.adapter_id), []).append(tokens)

    def means(self, record: BlockRecord) -> bool:
        """Whether a block that the store remembers is meant."""
        return (
            self._everything
            or record.salt in self._salts
            or record.session_id in self._sessions
            or record.key in self._keys
            or record.parent_key in self._keys
            or (record.parent_key is None and self._begins(record))
        )

    def _begins(self, record: BlockRecord) -> bool:
        """Whether a prompt of less than a block is the beginning of a first block, or goes on behind it."""
        prompts = self._beginnings.get((record.salt, record.adapter_id), ())
        return any(record.tokens.startswith(prompt) or prompt.startswith(record.tokens) for prompt in prompts)


def _size(target: ForgetTarget) -> int:
    return 1 if target.prefix is None else 1 + len(target.prefix.token_ids)
