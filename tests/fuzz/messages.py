"""Makes requests: valid ones about existing things, edge cases, and bytes that are no message at all."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from tests.fuzz import values
from tests.fuzz.limits import keep_within
from tests.fuzz.memory import Memory
from tests.fuzz.repairs import is_in, mend

# Of messages in one message, and of their depth.
_NODES = 250
_DEPTH = 6
_DEEPEST = 96
# Names of fields whose values are valid only for a moment: repeated messages get the latest value.
_FLEETING = ("epoch", "step", "number", "token", "etag", "handle", "ticket")
# Number of kept messages per type, of accepted and of refused messages each.
_KEPT = 24
_MOST_ROUNDS = 20
# At bounds: the share of requests that stay as they are, so that valid ones are learnt from answers, and how many
# numbers of the others are set.
_UNCHANGED = 0.25
NUMBERS_SET = (1, 1, 1, 2, 3)


class Made(NamedTuple):
    """A request. first: it begins a stream. rounds: how often it was mended."""

    data: bytes
    first: bool = False
    rounds: int = 0


class Maker:
    """Makes messages of any type. What was answered well is kept and changed a little.

    at_bounds: some numbers of most messages are at the bounds of their types.
    """

    def __init__(self, memory: Memory, *, at_bounds: bool = False) -> None:
        self._memory = memory
        self._at_bounds = at_bounds
        # By type, and whether they began a stream.
        self._good: dict[tuple[str, bool], list[bytes]] = {}
        # With the fields at fault, the error about them, and how often the message was repaired already.
        self._refused: dict[tuple[str, bool], deque[tuple[Made, Mapping[str, str]]]] = {}

    def keep(self, cls: type[Message], made: Made, rng: random.Random) -> None:
        """A message that was answered well."""
        kept = self._good.setdefault((cls.DESCRIPTOR.full_name, made.first), [])
        if made.data in kept:
            return
        if len(kept) < _KEPT:
            kept.append(made.data)
        else:
            kept[rng.randrange(_KEPT)] = made.data

    def mend(self, cls: type[Message], made: Made, fields: Mapping[str, str]) -> None:
        """A message that may have been refused for some of its fields, to be mended."""
        if made.rounds < _MOST_ROUNDS and any(is_in(cls.FromString(made.data), path) for path in fields):
            key = cls.DESCRIPTOR.full_name, made.first
            self._refused.setdefault(key, deque(maxlen=_KEPT)).append((made, fields))

    def make(self, cls: type[Message], rng: random.Random, *, first: bool = False) -> Made:
        """One request. first: of a stream, which mostly begins with the first of its kinds."""
        made = self._made(cls, rng, first=first)
        if not self._at_bounds or rng.random() < _UNCHANGED:
            return made
        try:
            message = cls.FromString(made.data)
            _set_at_bounds(message, rng)
            keep_within(message)
            return made._replace(data=message.SerializeToString())
        except (DecodeError, EncodeError):
            return made

    def _made(self, cls: type[Message], rng: random.Random, *, first: bool) -> Made:
        draw = rng.random()
        if draw < 0.03:
            return Made(_within(cls, rng.randbytes(rng.choice((1, 2, 5, 20, 300)))), first)
        message, rounds = self._mended(cls, rng, first=first) if draw > 0.6 else (None, 0)
        if message is None:
            message = self._message(cls, rng, first=first)
        keep_within(message)
        try:
            data = message.SerializeToString()
        except (EncodeError, ValueError):
            # Nested more deeply than this side writes.
            return Made(b"", first)
        if draw < 0.10:
            return Made(_within(cls, _mutated(data, rng)), first)
        if draw < 0.12:
            return Made(data + _unknown_fields(rng), first)
        return Made(data, first, rounds)

    def _mended(self, cls: type[Message], rng: random.Random, *, first: bool) -> tuple[Message | None, int]:
        refused = self._refused.get((cls.DESCRIPTOR.full_name, first))
        if not refused:
            return None, 0
        made, fields = refused.pop()
        message = cls.FromString(made.data)
        filling = _Filling(rng, self._memory, usual=1.0, depth=_DEPTH)
        for path, description in fields.items():
            mend(message, path, description, rng, filling.set)
        return message, made.rounds + 1

    def _message(self, cls: type[Message], rng: random.Random, *, first: bool) -> Message:
        message, draw = cls(), rng.random()
        kept = self._good.get((cls.DESCRIPTOR.full_name, first))
        if kept and draw < 0.35:
            message.ParseFromString(rng.choice(kept))
            filling = _Filling(rng, self._memory, usual=0.8, depth=_DEPTH)
            filling.refresh(message)
            for _ in range(rng.choice((0, 1, 1, 2, 3))):
                filling.change(rng.choice(list(parts(message))))
            return message
        usual, depth = (1.0, _DEPTH) if draw < 0.75 else (0.5, _DEPTH) if draw < 0.96 else (0.7, _DEEPEST)
        _Filling(rng, self._memory, usual=usual, depth=depth).fill(message, first=first)
        return message


class _Filling:
    """Fills one message. usual: share of the values that are usual."""

    def __init__(self, rng: random.Random, memory: Memory, *, usual: float, depth: int) -> None:
        self._rng = rng
        self._memory = memory
        self._usual = usual
        self._depth = depth
        self._left = _NODES

    def fill(self, message: Any, depth: int = 0, *, first: bool = False) -> None:
        """Sets some of the fields."""
        rng, descriptor = self._rng, message.DESCRIPTOR
        if descriptor.full_name == "google.protobuf.Duration":
            message.seconds, message.nanos = values.seconds(rng, usual=self._is_usual())
            return
        chosen = {oneof.name: self._choose(oneof, first=first) for oneof in _real_oneofs(descriptor)}
        share = rng.choice((0.05, 0.15, 0.4, 0.8))
        # What wraps a few fields is needed, and many parts are hardly ever all right.
        parts = max(share, 0.8 if len(descriptor.fields) < 6 and depth < 2 else 0.2)
        # Lists that belong together have equal lengths.
        column = rng.randrange(1, 5) if rng.random() < 0.5 else None
        for field in descriptor.fields:
            if self._left <= 0:
                return
            oneof = field.containing_oneof
            if oneof is not None and oneof.name in chosen:
                if chosen[oneof.name] is not field:
                    continue
            elif rng.random() > (parts if field.message_type is not None else share):
                continue
            self.set(message, field, depth, column)

    def change(self, message: Any) -> None:
        """Sets or clears one field."""
        if fields := list(message.DESCRIPTOR.fields):
            field = self._rng.choice(fields)
            message.ClearField(field.name)
            if self._rng.random() < 0.8:
                self.set(message, field)

    def refresh(self, message: Message) -> None:
        """Mostly gives fields whose values hold for a moment only those that were seen last."""
        for part in list(parts(message)):
            for field, _ in part.ListFields():
                if field.message_type is None and field.name.removesuffix("s").endswith(_FLEETING):
                    value = self._memory.recall(self._rng, field)
                    if value is not None and self._rng.random() < 0.4 and not field.is_repeated:
                        setattr(part, field.name, value)

    def _choose(self, oneof: OneofDescriptor, *, first: bool) -> FieldDescriptor | None:
        if first and self._rng.random() < 0.9:
            return oneof.fields[0]
        return self._rng.choice(list(oneof.fields)) if self._rng.random() < 0.9 else None

    def set(self, message: Any, field: FieldDescriptor, depth: int = 1, column: int | None = None) -> None:
        """Sets one field. column: length of the lists that belong together."""
        self._left -= 1
        if field.message_type is not None:
            if depth < self._depth:
                self._set_messages(message, field, depth)
        elif field.is_repeated:
            getattr(message, field.name).extend(self._list(field, column))
        else:
            setattr(message, field.name, self._scalar(field))

    def _set_messages(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        rng, holder = self._rng, getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            for _ in range(rng.choice((1, 1, 2, 4))):
                key = self._scalar(field.message_type.fields_by_name["key"])
                if value.message_type is not None:
                    self.fill(holder[key], depth + 1)
                else:
                    holder[key] = self._scalar(value)
        elif field.is_repeated:
            counts = (1, 1, 2, 3) if self._is_usual() else (0, 1, 5, 65, 257)
            for _ in range(rng.choice(counts)):
                self.fill(holder.add(), depth + 1)
        else:
            holder.SetInParent()
            self.fill(holder, depth + 1)

    def _list(self, field: FieldDescriptor, column: int | None) -> list[Any]:
        rng = self._rng
        if self._is_usual():
            seen = self._memory.recall_list(rng, field)
            if seen and rng.random() < 0.6:
                # The same value, its beginning, or the value with more after it.
                cut = rng.choice((len(seen), len(seen), rng.randrange(len(seen) + 1)))
                return seen[:cut] + [self._scalar(field) for _ in range(rng.choice((0, 0, 1, 20)))]
            count = column or rng.choice((1, 2, 5, 16, 17, 33, 64, 130))
        else:
            count = rng.choice((0, 1, 2, 17, 65, 257, 1000))
        return [self._scalar(field) for _ in range(count)]

    def _scalar(self, field: FieldDescriptor) -> Any:
        usual = self._is_usual()
        if usual and field.enum_type is None and self._rng.random() < 0.7:
            seen = self._memory.recall(self._rng, field)
            if seen is not None:
                return seen
        return values.scalar(self._rng, field, usual=usual)

    def _is_usual(self) -> bool:
        return self._rng.random() < self._usual


def _real_oneofs(descriptor: Descriptor) -> list[OneofDescriptor]:
    """Without those that stand for `optional`."""
    return [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]


def parts(message: Message) -> Iterator[Message]:
    """The message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for one in value.values():
                    yield from parts(one)
        elif field.is_repeated:
            for one in value:
                yield from parts(one)
        else:
            yield from parts(value)


def _set_at_bounds(message: Message, rng: random.Random) -> None:
    numbers = [
        (part, field) for part in parts(message) for field in part.DESCRIPTOR.fields if field.cpp_type in values.NUMBERS
    ]
    for part, field in rng.sample(numbers, min(len(numbers), rng.choice(NUMBERS_SET))):
        value = values.bound(rng, field)
        if field.is_repeated:
            getattr(part, field.name).append(value)
        else:
            setattr(part, field.name, value)


def _within(cls: type[Message], data: bytes) -> bytes:
    """The bytes, unless they are a message that asks for too much."""
    try:
        message = cls.FromString(data)
    except DecodeError:
        return data
    return message.SerializeToString() if keep_within(message) else data


def _mutated(data: bytes, rng: random.Random) -> bytes:
    """Bits turned, bytes cut out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.choice((1, 4, 1000))]
            case 2:
                changed[at:at] = changed[at : at + rng.choice((1, 8, 64))]
            case 3:
                changed[at:at] = rng.randbytes(rng.choice((1, 3, 9)))
            case _:
                del changed[at:]
    return bytes(changed)


def _unknown_fields(rng: random.Random) -> bytes:
    """Fields of numbers that no message has: a number, bytes, a fixed one."""
    tag = rng.choice((1900, 15_000, 536_870_911))
    kind = rng.choice((0, 1, 2, 5))
    body = {0: b"\x96\x01", 1: bytes(8), 2: b"\x03abc", 5: bytes(4)}[kind]
    return _varint(tag << 3 | kind) + body


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
