"""How answers are shown: columns for people, the messages themselves as JSON or YAML for programs."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

import typer
import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.cells import cell_len

from protos.rpc.durations import seconds

T = TypeVar("T")
Data: TypeAlias = "Message | Mapping[str, Data] | Sequence[Data] | str | float | None"


class Format(StrEnum):
    """How to show an answer. NAME: only the names of listed things, a line each."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table. wide: only with `-o wide`. name: the text for `-o name`, if the column names the rows."""

    header: str
    cell: Callable[[T], object]
    wide: bool = False
    name: Callable[[T], object] | None = None


def show(output: Format, data: Data, people: Callable[[bool], str]) -> None:
    """Prints an answer. people: makes its text; the argument is whether the text may be wide."""
    match output:
        case Format.JSON:
            text = json.dumps(plain(data), indent=2, ensure_ascii=False)
        case Format.YAML:
            text = as_yaml(data)
        case _:
            text = people(output is Format.WIDE)
    typer.echo(text.rstrip("\n"))


def as_yaml(data: Data) -> str:
    """The data as YAML, in its own order."""
    text: str = yaml.safe_dump(plain(data), sort_keys=False, allow_unicode=True)
    return text


def plain(data: Data) -> Any:
    """Messages as protobuf's JSON, with the field names of the .proto files.

    Fields that are not optional are written out even if they are 0 or empty. Bytes, such as keys of blocks, are
    hexadecimal as in tables.
    """
    match data:
        case Message():
            made = MessageToDict(data, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            _spell_bytes(data, made)
            return made
        case Mapping():
            return {name: plain(value) for name, value in data.items()}
        case str() | None | int() | float():
            return data
        case _:
            return [plain(value) for value in data]


def _spell_bytes(message: Message, made: dict[str, Any]) -> None:
    """Writes bytes in a message's JSON as hexadecimal numbers."""
    for field, value in message.ListFields():
        # A message with a special form in JSON has other names in this form.
        shown = made.get(field.name)
        if isinstance(value, bytes):
            made[field.name] = value.hex()
        elif isinstance(shown, dict) and isinstance(value, Message):
            _spell_bytes(value, shown)
        elif isinstance(shown, list):
            for part, made_part in zip(value, shown, strict=True):
                if isinstance(part, Message) and isinstance(made_part, dict):
                    _spell_bytes(part, made_part)


def table(columns: Sequence[Column[T]], items: Iterable[T], *, wide: bool) -> str:
    """Aligned columns below their headers."""
    shown = [column for column in columns if wide or not column.wide]
    rows = [[column.header for column in shown]]
    rows += [[printable(column.cell(item)) for column in shown] for item in items]
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def names(columns: Sequence[Column[T]], items: Iterable[T]) -> str:
    """The names of things, each once: by the column that has names, else by the first column."""
    column = next((column for column in columns if column.name), columns[0])
    return "\n".join(dict.fromkeys(printable((column.name or column.cell)(item)) for item in items))


def printable(value: object) -> str:
    """Text for a terminal. A salt or another name that a caller chose cannot control the terminal."""
    text = "-" if value is None or value == "" else str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def optional(message: Message, field: str) -> Any:
    """An optional field, or None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def key(value: bytes) -> str:
    """The beginning of a block's key."""
    return value[:6].hex()


def word(name: str) -> str:
    """The name of an enum's value without its type: TIER_DEVICE is device."""
    return name.partition("_")[2].lower()


def share(part: float, whole: float) -> str:
    """A percentage, or a dash if there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"


def lasting(message: Message, field: str) -> str:
    """The remaining time, or a dash if there is no end."""
    if not message.HasField(field):
        return "-"
    return span(seconds(getattr(message, field)))


def span(duration: float) -> str:
    """Seconds as a time in its two largest units."""
    for name, size, smaller, rest in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if duration >= size:
            whole, left = divmod(int(duration), size)
            return f"{whole}{name}" + (f"{left // rest}{smaller}" if left // rest else "")
    return f"{duration:.3g}s"


def number(count: int, noun: str) -> str:
    """How many of a thing: 1 block, 2 blocks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def blocks(count: int) -> str:
    """How many blocks."""
    return number(count, "block")


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
