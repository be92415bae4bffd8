"""Numbers at the bounds of their types, in fields of messages."""

from __future__ import annotations

import random

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from tests.fuzz import values
from tests.fuzz.limits import keep_within
from tests.fuzz.memory import Memory
from tests.fuzz.messages import Made, Maker, parts

# Requests that stay as they are, so that what is valid can be learnt from answers.
_UNCHANGED = 0.25
# How many numbers of a request are set.
HOW_MANY = (1, 1, 1, 2, 3)


class MakerAtBounds(Maker):
    """Makes requests as others are made, and sets some numbers of most of them."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.at_bounds = 0

    def make(self, cls: type[Message], rng: random.Random, *, first: bool = False) -> Made:
        """One request."""
        made = super().make(cls, rng, first=first)
        if rng.random() < _UNCHANGED:
            return made
        try:
            message = cls.FromString(made.data)
            changed = _set_numbers(message, rng)
            keep_within(message)
            data = message.SerializeToString()
        except (DecodeError, EncodeError):
            return made
        self.at_bounds += changed
        return made._replace(data=data)


def _set_numbers(message: Message, rng: random.Random) -> bool:
    fields = [(part, field) for part in parts(message) for field in part.DESCRIPTOR.fields if _is_number(field)]
    for part, field in rng.sample(fields, min(len(fields), rng.choice(HOW_MANY))):
        value = values.bound(rng, field)
        if field.is_repeated:
            getattr(part, field.name).append(value)
        else:
            setattr(part, field.name, value)
    return bool(fields)


def _is_number(field: FieldDescriptor) -> bool:
    return field.cpp_type in values.NUMBERS
