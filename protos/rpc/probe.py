"""Tells supervisors that run a command whether a process here serves: `python -m protos.rpc.probe executor`.

It reads the settings that all processes share, and exits with status 0 if grpc.health.v1 there says SERVING.
"""

import ipaddress
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.rpc import addresses
from protos.rpc.channel import open_sync_channel
from protos.rpc.security import Security
from protos.rpc.settings import STACK_METRICS, ProcessSettings, load
from protos.rpc.startup import process_parser

ANSWER_SECONDS = 3.0


def target(address: str) -> str:
    """The address at which a process that listens on `address` can be reached on its own machine."""
    if addresses.socket_path(address) is not None:
        return address
    host, port = addresses.split_host_port(address)
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return address
    # A name, since certificates have it more often than its addresses.
    return f"localhost:{port}" if everywhere else address


def problem(address: str, security: Security) -> str:
    """Why no process serves at an address; empty if a process does."""
    with open_sync_channel(target(address), security) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it says that it does not serve"


def main() -> int:
    """Runs the probe and returns the exit status."""
    parser = process_parser(
        "python -m protos.rpc.probe", "Asks a process on this machine for its health: status 0 if it serves, else 1."
    )
    processes = [name for name in STACK_METRICS if f"{name}_address" in ProcessSettings.model_fields]
    parser.add_argument("process", choices=processes)
    process = parser.parse_args().process
    settings = load(ProcessSettings, os.environ)
    address = getattr(settings, f"{process}_address")
    if found := problem(address, settings.security):
        print(f"{process} at {address}: {found}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
