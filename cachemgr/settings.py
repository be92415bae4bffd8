"""Settings of the cache manager, KVKEEP_CACHEMGR_<NAME> beside the shared ones."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from protos.rpc import addresses
from protos.rpc.redis_client import check_redis_url
from protos.rpc.settings import MetricsAddress, ProcessSettings


class CachemgrSettings(ProcessSettings):
    """Read once by __main__."""

    process: ClassVar[str] = "cachemgr"
    listens_on: ClassVar[tuple[str, ...]] = (
        "cachemgr_address",
        "cachemgr_admin_address",
        "metrics_address",
        "zmq_events",
        "zmq_replays",
    )

    shard: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Name of this cache manager among those that share a Redis or a state folder: each needs its own.",
    )
    metrics_address: MetricsAddress = Field("", description="Where Prometheus reads metrics; empty is off.")
    lease_seconds: float = Field(
        10.0,
        gt=0,
        description="Time without a renewal after which an executor or scheduler counts as lost.",
    )
    capacity_ahead_tokens: int = Field(
        32, ge=0, description="Tokens of capacity allocated to running sequences ahead of need."
    )
    free_watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of a pool that admissions and capacity ahead of need leave free."
    )
    partial_reuse: bool = Field(True, description="Reuse blocks of which only a leading part matches the prompt.")
    copy_on_partial_reuse: bool = Field(
        True,
        description="Copy the matching part of such a block; else overwrite the rest of it when no sequence uses it. "
        "Without partial reuse, a partly filled block matches as a whole only; with neither setting, none is stored.",
    )
    offload_min_priority: int = Field(
        35, ge=0, le=100, description="Blocks of a lower priority are dropped, not offloaded to a lower tier."
    )
    write_through: bool = Field(
        True,
        description="Copy cached blocks to empty host slots in the background, so that fewer are lost with a device.",
    )
    max_retention_priority: int = Field(
        100, ge=0, le=100, description="Highest priority that a retention request is granted."
    )
    max_retention_seconds: float = Field(
        0.0, ge=0, description="Longest time that a retention request is granted; 0 is no bound."
    )
    pin_budget: float = Field(0.1, ge=0, le=1, description="Share of a pool that pins may keep.")
    ghost_sample: int = Field(
        2048, ge=0, description="Blocks that ghost caches sample of as many as the device has; 0 turns them off."
    )
    zmq_events: str = Field(
        "",
        description="Where routers follow the blocks of executors, over ZeroMQ in vLLM's format, as `127.0.0.1:5557`; "
        "empty is off. An executor whose name ends with a number adds it to the port.",
    )
    zmq_replays: str = Field(
        "", description="Where they ask for what they missed, likewise, as `127.0.0.1:6557`; empty is nowhere."
    )
    zmq_topic: str = Field(
        "", description="Topic of these events, in which {executor_id} and {model} stand for those of the executor."
    )
    zmq_token_ids: bool = Field(
        False,
        description="Send token ids with these events, for routers that hash them. They are prompts and answers in "
        "clear, and all that reach the address can read them.",
    )
    redis_flush_seconds: float = Field(0.05, gt=0, description="Time between writes of index changes to Redis.")
    redis_max_pending: int = Field(
        200_000, gt=0, description="Most changed blocks that wait for Redis; beyond it the whole index is copied later."
    )
    key_index: bool = Field(
        False,
        description="Write an index by key into that Redis, too, for routers that have no view of a cache yet.",
    )
    operation_log: Path | None = Field(
        None,
        description="File of all calls that change the state, with token ids, for `python -m cachemgr replay FILE`. "
        "The file of the start before is renamed to FILE.1, FILE.2 and so on.",
    )
    drain_seconds: float = Field(10.0, ge=0, description="Longest time that running calls may go on after SIGTERM.")

    @field_validator("zmq_events", "zmq_replays")
    @classmethod
    def _check_zmq_address(cls, address: str, info: ValidationInfo) -> str:
        """Checks an address of ZeroMQ, which has neither TLS nor tokens here and binds to numeric addresses only."""
        if not address:
            return address
        host, port = addresses.split_host_port(address)
        if not addresses.is_own_name(f"[{host}]" if ":" in host else host) or not port:
            raise ValueError("must have localhost or an IP address, and a port that is not 0")
        # Absent if `insecure` itself is invalid.
        if not info.data.get("insecure", True) and not addresses.is_loopback(address):
            raise ValueError(
                f"{address} can be reached from other machines without TLS: use a loopback address, or allow it with "
                "KVKEEP_INSECURE=1"
            )
        return address

    @model_validator(mode="after")
    def _check_zmq(self) -> Self:
        if self.zmq_replays and not self.zmq_events:
            raise ValueError("KVKEEP_CACHEMGR_ZMQ_REPLAYS needs KVKEEP_CACHEMGR_ZMQ_EVENTS")
        return self

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str, info: ValidationInfo) -> str:
        """Checks the URL: Redis holds all tenants' prompts, so it needs TLS whenever a server here does."""
        # Absent if `insecure` itself is invalid.
        return check_redis_url(url, insecure=info.data.get("insecure", True))
