"""Finds the field that makes the bytes of a message invalid, which protobuf's own error does not say."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from protos.rpc.errors import MalformedMessageError

_MAX_DEPTH = 100
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Corrupt(Exception):  # noqa: N818 - a signal inside this file, not an error of the interface
    pass


def parse_strictly(from_string: Callable[[bytes], Any], data: bytes) -> Any:
    """Parses a message; raises MalformedMessageError that names the field at fault where one can be found."""
    try:
        return from_string(data)
    except DecodeError as error:
        message_class = getattr(from_string, "__self__", None)
        descriptor = getattr(message_class, "DESCRIPTOR", None)
        if descriptor is None:
            raise MalformedMessageError("the request cannot be decoded") from error
        found = find_invalid_field(descriptor, data)
        if found is None:
            raise MalformedMessageError(f"the request is not a {descriptor.full_name}") from error
        field, description = found
        raise MalformedMessageError(f"{field} {description}", fields={field: description}) from error


def find_invalid_field(descriptor: Descriptor, data: bytes) -> tuple[str, str] | None:
    """Path and fault of the first invalid field, such as ("messages[1].content", "is not valid UTF-8").

    None when the fault is in the message itself, not in one of its fields.
    """
    try:
        return _search(descriptor, memoryview(data), "", 0)
    except _Corrupt:
        return None


def _search(descriptor: Descriptor, data: memoryview, prefix: str, depth: int) -> tuple[str, str] | None:
    """Raises _Corrupt when the framing of this message is broken."""
    seen: Counter[int] = Counter()
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value, position = _value(data, position, tag & 7)
        field = descriptor.fields_by_number.get(tag >> 3)
        if field is None or value is None:
            continue
        path = f"{prefix}{field.name}"
        if field.is_repeated:
            path += f"[{seen[field.number]}]"
            seen[field.number] += 1
        found = _check(field, value, path, depth)
        if found is not None:
            return found
    return None


def _check(field: FieldDescriptor, value: memoryview, path: str, depth: int) -> tuple[str, str] | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            str(value, "utf-8")
        except UnicodeDecodeError:
            return path, "is not valid UTF-8"
    if field.message_type is not None:
        if depth == _MAX_DEPTH:
            return path, "is nested too deeply"
        try:
            return _search(field.message_type, value, f"{path}.", depth + 1)
        except _Corrupt:
            return path, f"is not a {field.message_type.full_name}"
    return None


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _Corrupt
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
    raise _Corrupt


def _value(data: memoryview, position: int, wire_type: int) -> tuple[memoryview | None, int]:
    """The bytes of a length-delimited value, None for a number; and the position behind it."""
    if wire_type == _VARINT:
        return None, _varint(data, position)[1]
    if wire_type == _BYTES:
        length, position = _varint(data, position)
    elif wire_type in (_FIXED64, _FIXED32):
        length = 8 if wire_type == _FIXED64 else 4
    else:
        raise _Corrupt
    end = position + length
    if end > len(data):
        raise _Corrupt
    return (data[position:end] if wire_type == _BYTES else None), end
