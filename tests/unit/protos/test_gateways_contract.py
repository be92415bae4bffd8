"""Our definition of vLLM's engine contract is that of the package with which gateways speak it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from protos.smg import common_pb2
from protos.vllm import engine_pb2

OURS = (common_pb2, engine_pb2)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Their files. They cannot be imported beside ours: a process has one message of a name."""
    package = importlib.util.find_spec("smg_grpc_proto")
    assert package is not None
    assert package.origin is not None
    written = tmp_path_factory.mktemp("protos") / "files"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{Path(package.origin).parent / 'proto'}"]
    subprocess.run([*command, "--include_imports", f"--descriptor_set_out={written}", "vllm_engine.proto"], check=True)
    return list(FileDescriptorSet.FromString(written.read_bytes()).file)


def _oneof(message: object, field: FieldDescriptorProto) -> str:
    """The choice that a field is one of; empty for none."""
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return str(message.oneof_decl[field.oneof_index].name)  # type: ignore[attr-defined]


def test_fields_have_their_names_numbers_and_types(theirs: list[FileDescriptorProto]) -> None:
    messages = {f"{file.package}.{message.name}": message for file in theirs for message in file.message_type}
    for file in OURS:
        described = FileDescriptorProto.FromString(file.DESCRIPTOR.serialized_pb)
        for message in described.message_type:
            other_message = messages[f"{described.package}.{message.name}"]
            others = {field.number: field for field in other_message.field}
            for field in message.field:
                other = others[field.number]
                mine, yours = (
                    (one.name, one.type, one.type_name, one.label, one.proto3_optional, _oneof(whole, one))
                    for whole, one in ((message, field), (other_message, other))
                )
                assert mine == yours, message.name


def test_requests_lack_no_field(theirs: list[FileDescriptorProto]) -> None:
    """An unknown field would be dropped without a word."""
    messages = {f"{file.package}.{message.name}": message for file in theirs for message in file.message_type}
    for message in (engine_pb2.GenerateRequest, engine_pb2.SamplingParams, engine_pb2.TokenizedInput):
        wanted = {field.name for field in messages[message.DESCRIPTOR.full_name].field}
        assert wanted == set(message.DESCRIPTOR.fields_by_name)


def test_methods_have_their_names_and_messages(theirs: list[FileDescriptorProto]) -> None:
    [service] = [service for file in theirs for service in file.service]
    [own] = FileDescriptorProto.FromString(engine_pb2.DESCRIPTOR.serialized_pb).service
    assert own.name == service.name
    methods = {method.name: method for method in service.method}
    assert [methods[method.name] for method in own.method] == list(own.method)
    # gRPC answers them with UNIMPLEMENTED by itself.
    assert methods.keys() - {method.name for method in own.method} == {"FlushCache", "StartProfile", "StopProfile"}
