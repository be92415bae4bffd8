"""Mends what was refused: errors name the field at fault, and often say what it must be."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_STEP = re.compile(r"(\w+)(?:\[(\d+)\])?")
_NUMBER = re.compile(r"\d[\d,]*")
_INTEGERS = range(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT64 + 1)

# Sets a field of a message anew.
Set = Callable[[Message, FieldDescriptor], None]


def mend(message: Message, path: str, description: str, rng: random.Random, set_field: Set) -> bool:
    """Changes what an error names, such as "rule.action.pin_duration"; False when it is not in the message.

    path: may begin within one of the parts, and may leave out which of several it is about.
    """
    steps = _STEP.findall(path)
    for start in (message, *(value for field, value in message.ListFields() if _is_one_message(field))):
        holder: Any = start
        for name, index in steps[:-1]:
            holder = _below(holder, name, index, rng)
            if holder is None:
                break
        else:
            if steps and _mend_field(holder, *steps[-1], description, rng, set_field):
                return True
    return False


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


def _mend_field(holder: Message, name: str, index: str, description: str, rng: random.Random, set_field: Set) -> bool:
    oneof = holder.DESCRIPTOR.oneofs_by_name.get(name)
    field = rng.choice(list(oneof.fields)) if oneof is not None else holder.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        return False
    if field.is_repeated and index and int(index) < len(getattr(holder, name)):
        del getattr(holder, name)[int(index)]
        return True
    was_there = bool(getattr(holder, field.name)) if field.is_repeated else _is_set(holder, field)
    holder.ClearField(field.name)
    said = [int(number.replace(",", "")) for number in _NUMBER.findall(description)]
    if said and field.cpp_type in _INTEGERS and not field.is_repeated and rng.random() < 0.6:
        try:
            setattr(holder, field.name, rng.choice(said))
        except ValueError:
            return True
    elif not was_there or rng.random() < 0.6:
        set_field(holder, field)
    return True


def _is_set(holder: Message, field: FieldDescriptor) -> bool:
    return holder.HasField(field.name) if field.has_presence else bool(getattr(holder, field.name))


def _is_one_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated
