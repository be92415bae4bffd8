"""Settings of the router process."""

import socket
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from protos.rpc import addresses
from protos.rpc.addresses import AddressError
from protos.rpc.redis_client import check_redis_url
from protos.rpc.settings import Address, MetricsAddress, OptionalPath
from scheduler.router.policies import POLICIES
from scheduler.settings import HttpSettings, ReasoningForm, ToolCallForm

DNS, FILE = "dns:///", "file://"


def _engines(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = tuple(address for part in value.split(",") if (address := part.strip()))
    if not found:
        raise ValueError(
            "must name at least one engine: host:port, unix:/path, dns:///name:port or file:///path, commas between"
        )
    for address in found:
        try:
            if not address.startswith(f"{FILE}/"):
                addresses.validate(address.removeprefix(DNS))
        except AddressError as error:
            raise ValueError(str(error)) from error
    if len(set(found)) < len(found):
        raise ValueError("names an engine twice")
    return found


class RouterSettings(HttpSettings):
    """Own fields are variables KVKEEP_ROUTER_<NAME>; those shared by all processes KVKEEP_<NAME>."""

    process: ClassVar[str] = "router"
    listens_on: ClassVar[tuple[str, ...]] = ("address", "http_address", "metrics_address")

    engines: Annotated[tuple[str, ...], BeforeValidator(_engines)] = Field(
        (),
        validate_default=False,
        description="Engines, by the gRPC address of each scheduler, with commas between them. `dns:///name:port` "
        "stands for every address of a name, `file:///path` for every line of a file; both are read every few seconds.",
    )
    model: str = Field(
        "", description="Name or hub id of the model of all engines; empty is that of the engine that answers first."
    )
    address: Address = Field("127.0.0.1:50054", description="Where the router serves generation.")
    http_address: MetricsAddress = Field(
        "127.0.0.1:8001", description="Where the router serves OpenAI's API over HTTP; empty is off."
    )
    metrics_address: MetricsAddress = Field("", description="Where Prometheus reads metrics; empty is off.")
    policy: str = Field("cost", description=f"How it chooses an engine: {', '.join(POLICIES)}.")
    router_id: str = Field(
        default_factory=socket.gethostname, min_length=1, max_length=64, description="Stable name in engines' logs."
    )
    access_log: OptionalPath = Field(None, description="File with a JSON line per request; empty is the usual log.")
    max_waiting: int = Field(256, ge=1, description="Most samples that wait for an engine; more are refused.")
    max_tenant_requests: int = Field(0, ge=0, description="Most live requests of a tenant; 0 is no bound.")
    tool_call_parser: ToolCallForm = "auto"
    reasoning_parser: ReasoningForm = "auto"
    drain_seconds: float = Field(30.0, ge=0, description="Longest time that running requests may go on after SIGTERM.")

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str, info: ValidationInfo) -> str:
        # The setting is absent if it is invalid itself.
        return check_redis_url(url, insecure=info.data.get("insecure", True))

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"must be one of {', '.join(POLICIES)}")
        return policy
