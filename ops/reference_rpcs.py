"""The pages of RPCs, from the .proto files and their comments."""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from reference_text import GENERATED, anchor, code, escaped, first_sentence, paragraph, table

ROOT = Path(__file__).resolve().parents[1]
# Each file with the page and its title.
PAGES = {
    "protos/generation/v1/generation.proto": ("rpcs-generation.md", "RPCs of the scheduler"),
    "protos/kvcache/v1/kvcache.proto": ("rpcs-kvcache.md", "RPCs of the cache manager"),
    "protos/execution/v1/execution.proto": ("rpcs-execution.md", "RPCs of the executor"),
    "protos/kvcommon/v1/kvcommon.proto": ("rpcs-common.md", "Messages that RPCs share"),
}
# Numbers of fields in descriptors; paths to comments consist of these numbers.
_SYNTAX, _MESSAGES, _ENUMS, _SERVICES = 12, 4, 5, 6
_FIELDS, _NESTED, _METHODS, _VALUES = 2, 3, 2, 2
_TYPES = FieldDescriptorProto.Type
_EMPTY = "It has no fields.\n"


@dataclass(frozen=True)
class _Message:
    name: str
    comment: str
    fields: tuple[tuple[str, str, str], ...]


@cache
def _files() -> dict[str, FileDescriptorProto]:
    """The files as protoc reads them, with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "protos")
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={target}", *PAGES], cwd=ROOT, check=True)
        return {file.name: file for file in FileDescriptorSet.FromString(target.read_bytes()).file}


@cache
def _used_in_fields() -> set[str]:
    """Full names of the types of all fields of all messages."""

    def types(messages: Iterable[DescriptorProto]) -> Iterator[str]:
        for message in messages:
            yield from (field.type_name for field in message.field)
            yield from types(message.nested_type)

    return {name for file in _files().values() for name in types(file.message_type)}


def pages() -> dict[str, str]:
    """The pages by their names."""
    return {page: _Page(_files()[name], title).text() for name, (page, title) in PAGES.items()}


class _Page:
    def __init__(self, file: FileDescriptorProto, title: str) -> None:
        self._file, self._title = file, title
        self._comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}
        self._messages = {
            message.name: message
            for index, one in enumerate(file.message_type)
            for message in self._message(one, (_MESSAGES, index))
        }
        self._enums = list(self._all_enums())

    def text(self) -> str:
        """The whole page: services with the messages that only one method uses, then all other messages."""
        package = f".{self._file.package}."
        taken = Counter(
            name for service in self._file.service for method in service.method
            for name in (method.input_type, method.output_type)
        )  # fmt: skip
        inline = {
            name.removeprefix(package) for name, times in taken.items() if times == 1 and name not in _used_in_fields()
        }
        text = f"# {self._title}\n\n" + GENERATED + paragraph(self._comment(_SYNTAX))
        text += "\n" + paragraph(f"From {code(self._file.name)}, package {code(self._file.package)}.")
        if others := [f"[{title}]({page})" for page, title in PAGES.values() if title != self._title]:
            text += "\n" + paragraph(f"See also: {', '.join(others)}.")
        for index, service in enumerate(self._file.service):
            text += self._service(service, index, inline)
        rest = [message for name, message in sorted(self._messages.items()) if name not in inline]
        if rest:
            text += "\n## Messages\n" + "".join(self._section(message) for message in rest)
        if self._enums:
            text += "\n## Enums\n" + "".join(self._enums)
        return text

    def _service(self, service: ServiceDescriptorProto, index: int, inline: set[str]) -> str:
        place = (_SERVICES, index)
        text = f"\n## {service.name}\n\n" + paragraph(self._comment(*place)) + "\n"
        methods = [(method, self._comment(*place, _METHODS, number)) for number, method in enumerate(service.method)]
        text += table(
            ("method", "what it does"),
            [(_link(code(method.name), method.name), first_sentence(comment)) for method, comment in methods],
        )
        for method, comment in methods:
            text += f"\n### {method.name}\n\n" + paragraph(comment)
            for kind, streams, name in (
                ("Request", method.client_streaming, method.input_type),
                ("Response", method.server_streaming, method.output_type),
            ):
                label = f"Stream of {kind.lower()}s" if streams else kind
                short = name.rpartition(".")[2]
                text += f"\n{label}: "
                if short in inline:
                    text += f"{code(short)}\n\n" + self._fields(self._messages[short])
                else:
                    text += _type_link(name, self._file.package) + "\n"
        return text

    def _section(self, message: _Message) -> str:
        return (
            f"\n### {message.name}\n\n"
            + (paragraph(message.comment) + "\n" if message.comment else "")
            + (self._fields(message))
        )

    @staticmethod
    def _fields(message: _Message) -> str:
        return table(("field", "type", "meaning"), message.fields) if message.fields else _EMPTY

    def _comment(self, *place: int) -> str:
        return escaped(self._comments.get(place, ""))

    def _message(self, message: DescriptorProto, place: tuple[int, ...], outer: str = "") -> Iterator[_Message]:
        maps = {one.name: one for one in message.nested_type if one.options.map_entry}
        name = f"{outer}{message.name}"
        fields = []
        for index, field in enumerate(message.field):
            comment = self._comment(*place, _FIELDS, index)
            if field.HasField("oneof_index") and not field.proto3_optional:
                comment += f" One of {code(message.oneof_decl[field.oneof_index].name)}."
            fields.append((code(field.name), self._type(field, maps), comment))
        yield _Message(name, self._comment(*place), tuple(fields))
        for index, inner in enumerate(message.nested_type):
            if inner.name not in maps:
                yield from self._message(inner, (*place, _NESTED, index), f"{name}.")

    def _type(self, field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
        entry = maps.get(field.type_name.rpartition(".")[2])
        if entry is not None:
            return "map of " + " to ".join(self._type(part, {}) for part in entry.field)
        shown = (
            _type_link(field.type_name, self._file.package)
            if field.type_name
            else _TYPES.Name(field.type).removeprefix("TYPE_").lower()
        )
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {shown}"
        return f"optional {shown}" if field.proto3_optional else shown

    def _all_enums(self) -> Iterator[str]:
        def enums(
            found: Iterable[EnumDescriptorProto], place: tuple[int, ...], outer: str
        ) -> Iterator[tuple[str, tuple[int, ...], EnumDescriptorProto]]:
            for index, enum in enumerate(found):
                yield f"{outer}{enum.name}", (*place, index), enum

        every = list(enums(self._file.enum_type, (_ENUMS,), ""))
        for index, message in enumerate(self._file.message_type):
            every += enums(message.enum_type, (_MESSAGES, index, 4), f"{message.name}.")
        for name, place, enum in sorted(every, key=lambda one: one[0]):
            rows = [
                (code(value.name), str(value.number), self._comment(*place, _VALUES, number))
                for number, value in enumerate(enum.value)
            ]
            lead = self._comment(*place)
            yield (
                f"\n### {name}\n\n"
                + (paragraph(lead) + "\n" if lead else "")
                + table(("value", "number", "meaning"), rows)
            )


def _link(text: str, name: str, page: str = "") -> str:
    return f"[{text}]({page}#{anchor(name)})"


def _type_link(full: str, package: str) -> str:
    """A message or an enum with a link to its description; without a link for types of other projects."""
    for file in _files().values():
        start = f".{file.package}."
        if full.startswith(start):
            name = full.removeprefix(start)
            page = "" if file.package == package else PAGES[file.name][0]
            return _link(code(name), name, page)
    return code(full.removeprefix("."))
