"""Repairs refused requests: errors name the field at fault, and often its valid values."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_STEP = re.compile(r"(\w+)(?:\[(\d+)\])?")
_NUMBER = re.compile(r"\d[\d,]*")
_QUOTED = re.compile(r"""["']([^"']+)["']""")
_INTEGERS = range(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT64 + 1)

# Sets a field of a message to a new value.
Set = Callable[[Message, FieldDescriptor], None]


def mend(message: Message, path: str, description: str, rng: random.Random, set_field: Set) -> None:
    """Changes what an error names, such as "rule.action.pin_duration".

    path: may begin within one of the parts, and may leave out which of several it is about.
    """
    for holder, name, index in _find(message, path, rng):
        _mend_field(holder, name, index, description, rng, set_field)
        return


def is_in(message: Message, path: str) -> bool:
    """Whether an error may be about this message."""
    return any(True for _ in _find(message, path, random.Random(0)))


def _find(message: Message, path: str, rng: random.Random) -> Iterator[tuple[Message, str, str]]:
    """The part that has the field, its name, and its index in a list or nothing."""
    *above, last = _STEP.findall(path) or [("", "")]
    for start in (message, *(value for field, value in message.ListFields() if _is_one_message(field))):
        holder: Any = start
        for name, index in above:
            holder = None if holder is None else _below(holder, name, index, rng)
        if holder is not None and _fields(holder, last[0]):
            yield holder, *last


def _fields(holder: Message, name: str) -> list[FieldDescriptor]:
    """The field of this name, or all of the oneof."""
    oneof, field = holder.DESCRIPTOR.oneofs_by_name.get(name), holder.DESCRIPTOR.fields_by_name.get(name)
    return list(oneof.fields) if oneof is not None else [] if field is None else [field]


def _below(holder: Message, name: str, index: str, rng: random.Random) -> Any:
    field = holder.DESCRIPTOR.fields_by_name.get(name)
    if field is None or field.message_type is None or field.message_type.GetOptions().map_entry:
        return None
    value = getattr(holder, name)
    if not field.is_repeated:
        return value
    if not value:
        return None
    return value[int(index) % len(value)] if index else rng.choice(value)


def _mend_field(holder: Message, name: str, index: str, description: str, rng: random.Random, set_field: Set) -> None:
    field = rng.choice(_fields(holder, name))
    if field.is_repeated and index and int(index) < len(getattr(holder, name)):
        del getattr(holder, name)[int(index)]
        return
    was_there = bool(getattr(holder, field.name)) if field.is_repeated else _is_set(holder, field)
    holder.ClearField(field.name)
    said = _said(field, description)
    if said and rng.random() < 0.6:
        # It may say what the type does not hold.
        with contextlib.suppress(ValueError):
            setattr(holder, field.name, rng.choice(said))
    elif not was_there or rng.random() < 0.6:
        set_field(holder, field)


def _said(field: FieldDescriptor, description: str) -> list[Any]:
    """Values in the description that the field could have."""
    if field.is_repeated:
        return []
    if field.cpp_type in _INTEGERS:
        return [int(number.replace(",", "")) for number in _NUMBER.findall(description)]
    return _QUOTED.findall(description) if field.type == FieldDescriptor.TYPE_STRING else []


def _is_set(holder: Message, field: FieldDescriptor) -> bool:
    return holder.HasField(field.name) if field.has_presence else bool(getattr(holder, field.name))


def _is_one_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated
