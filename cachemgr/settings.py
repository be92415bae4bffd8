"""Settings of the cache manager: KVKEEP_CACHEMGR_<NAME>, besides the shared settings."""

from typing import ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from protos.rpc import addresses
from protos.rpc.redis_client import check_redis_url
from protos.rpc.settings import MetricsAddress, OptionalPath, ProcessSettings


class CachemgrSettings(ProcessSettings):
    """Read once, by `process.run`."""

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
        description="Copy the matching part of a partly matching block; otherwise, take over a block that no sequence "
        "uses, and overwrite its rest. Without partial reuse, a partly filled block matches only as a whole; with "
        "neither setting, no partly filled block is stored.",
    )
    offload_min_priority: int = Field(
        35, ge=0, le=100, description="Blocks of a lower priority are dropped, not offloaded to a lower tier."
    )
    write_through: bool = Field(
        True,
        description="Copy cached device blocks to empty slots of the next lower tier in the background, so that fewer "
        "blocks are lost with the device.",
    )
    max_retention_priority: int = Field(
        100, ge=0, le=100, description="Highest priority that a retention request is granted."
    )
    max_retention_seconds: float = Field(
        0.0, ge=0, description="Longest time that a retention request is granted; 0 is no bound."
    )
    pin_budget: float = Field(0.1, ge=0, le=1, description="Share of a pool that pins may keep.")
    ghost_sample: int = Field(
        2048, ge=0, description="Sampled blocks of a ghost cache as large as the device; 0 turns ghost caches off."
    )
    zmq_events: str = Field(
        "",
        description="Where routers follow the blocks of executors, over ZeroMQ in vLLM's format, as `127.0.0.1:5557`; "
        "empty is off. A number at the end of an executor's name is added to the port.",
    )
    zmq_replays: str = Field(
        "",
        description="Where routers request events that they missed, as `127.0.0.1:6557`; empty is off. A number at the "
        "end of an executor's name is added to the port.",
    )
    zmq_topic: str = Field(
        "",
        description="Topic of these events; {executor_id} and {model} are replaced by the executor's id and model.",
    )
    zmq_token_ids: bool = Field(
        False,
        description="Send token ids with these events, for routers that hash token ids. Token ids are prompts and "
        "answers in clear text, which everyone who reaches the address can read.",
    )
    redis_flush_seconds: float = Field(0.05, gt=0, description="Time between writes of index changes to Redis.")
    redis_max_pending: int = Field(
        200_000,
        gt=0,
        description="Limit on changed blocks that wait for Redis; beyond the limit, an executor's whole index is "
        "written later.",
    )
    key_index: bool = Field(
        False,
        description="Also write an index by key to the Redis of KVKEEP_REDIS_URL, for routers that have no view of a "
        "cache yet.",
    )
    operation_log: OptionalPath = Field(
        None,
        description="File of all calls that change the state, with token ids, for `python -m cachemgr replay FILE`. "
        "The file of an earlier start is renamed to FILE.1, FILE.2 and so on.",
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
