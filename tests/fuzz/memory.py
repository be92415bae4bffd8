"""Values that fields had in earlier messages, so that later messages name existing things."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_KEPT = 24
# Of one message.
_MOST_VALUES = 60
_LONGEST = 600


class Memory:
    """Values by the names of their fields. `next_page_token` is also a page_token, `sequence_handle` one of handles."""

    def __init__(self) -> None:
        self._values: dict[str, deque[Any]] = {}
        self._lists: dict[str, deque[tuple[Any, ...]]] = {}
        self._kin: dict[str, list[str]] = {}

    def learn(self, message: Message) -> None:
        """Keeps the contents of a message, but not all of a very large message."""
        self._learn(message, [_MOST_VALUES])

    def recall(self, rng: random.Random, field: FieldDescriptor) -> Any:
        """A value that such a field had, for a number perhaps the next number; None if there was no value."""
        name = self._name_like(rng, field)
        if name is None:
            return None
        kept = self._values[name]
        # New values are valid more often than old values.
        value = kept[-1] if rng.random() < 0.5 else rng.choice(kept)
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.3 and 0 <= value < 2**31 - 1:
            return value + 1
        return value

    def recall_list(self, rng: random.Random, field: FieldDescriptor) -> list[Any] | None:
        """A whole list that such a field had."""
        kept = self._lists.get(_key(field))
        return list(rng.choice(kept)) if kept else None

    def _name_like(self, rng: random.Random, field: FieldDescriptor) -> str | None:
        wanted = _key(field)
        kin = self._kin.get(wanted)
        if kin is None:
            kin = self._kin[wanted] = [name for name in self._values if _alike(name, wanted)]
        return rng.choice(kin) if kin else None

    def _learn(self, message: Message, left: list[int]) -> None:
        for field, value in message.ListFields():
            if left[0] <= 0:
                return
            key = _key(field)
            if field.message_type is not None:
                if field.message_type.GetOptions().map_entry:
                    continue
                for part in value if field.is_repeated else [value]:
                    self._learn(part, left)
            elif field.is_repeated:
                left[0] -= 1
                self._lists.setdefault(key, deque(maxlen=_KEPT)).append(tuple(value[:_LONGEST]))
                for one in value[:3]:
                    self._keep(key, one)
            else:
                left[0] -= 1
                self._keep(key, value)

    def _keep(self, key: str, value: Any) -> None:
        if isinstance(value, str | bytes) and not 0 < len(value) <= _LONGEST:
            return
        kept = self._values.get(key)
        if kept is None:
            kept = self._values[key] = deque(maxlen=_KEPT)
            self._kin.clear()
        if not kept or kept[-1] != value:
            kept.append(value)


def _key(field: FieldDescriptor) -> str:
    """Its type and its name in the singular."""
    return f"{field.type} {field.name.removesuffix('s')}"


def _alike(name: str, wanted: str) -> bool:
    """Whether one is the other with something in front; both begin with the type."""
    kind, _, short = wanted.partition(" ")
    other_kind, _, other = name.partition(" ")
    return kind == other_kind and (short == other or other.endswith(f"_{short}") or short.endswith(f"_{other}"))
