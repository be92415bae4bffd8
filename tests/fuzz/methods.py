"""Every method that a process announces by reflection: methods that a service adds are fuzzed without a change here."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos.rpc.channel import open_sync_channel


@dataclass(frozen=True)
class Method:
    """One method at one address. fields: how many its request has, those of messages in it too."""

    address: str
    name: str
    request: type[Message]
    response: type[Message]
    streams_requests: bool
    streams_responses: bool
    fields: int


def discover(address: str) -> list[Method]:
    """All methods that a server has, by name."""
    with open_sync_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in sorted(database.get_services())]
        return [_method(address, method) for service in services for method in service.methods]


def _method(address: str, method: MethodDescriptor) -> Method:
    return Method(
        address,
        f"{method.containing_service.full_name}/{method.name}",
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        method.client_streaming,
        method.server_streaming,
        _count_fields(method.input_type, set()),
    )


def _count_fields(descriptor: Descriptor, seen: set[str]) -> int:
    if descriptor.full_name in seen:
        return 0
    seen.add(descriptor.full_name)
    parts = [field.message_type for field in descriptor.fields if field.message_type is not None]
    return len(descriptor.fields) + sum(_count_fields(part, seen) for part in parts)
