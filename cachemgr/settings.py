"""Settings of the cache manager, KVKEEP_CACHEMGR_<NAME> beside the shared ones."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection, parse_url

from protos.rpc import addresses
from protos.rpc.settings import MetricsAddress, ProcessSettings, cluster_nodes


class CachemgrSettings(ProcessSettings):
    """Read once by __main__."""

    process: ClassVar[str] = "cachemgr"
    listens_on: ClassVar[tuple[str, ...]] = ("cachemgr_address", "cachemgr_admin_address", "metrics_address")

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
    redis_flush_seconds: float = Field(0.05, gt=0, description="Time between writes of index changes to Redis.")
    redis_max_pending: int = Field(
        200_000, gt=0, description="Most changed blocks that wait for Redis; beyond it the whole index is copied later."
    )
    operation_log: Path | None = Field(
        None,
        description="File of all calls with their token ids, for `python -m cachemgr replay FILE`. The file of the "
        "start before is renamed to FILE.1, FILE.2 and so on.",
    )
    drain_seconds: float = Field(10.0, ge=0, description="Longest time that running calls may go on after SIGTERM.")

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str, info: ValidationInfo) -> str:
        """Redis holds the prompts of all tenants: it needs TLS where an answer of a server here does."""
        # Absent when it is at fault itself.
        if url and not info.data.get("insecure", True) and (address := without_tls(url)):
            raise ValueError(
                f"{address} is on another machine and would be reached without TLS: use a loopback address or a unix "
                "socket, write rediss:// or rediss+cluster://, or allow it with KVKEEP_INSECURE=1"
            )
        return url


def without_tls(url: str) -> str:
    """The first server of another machine that the URL leads to without TLS, empty for none. Raises ValueError."""
    first, nodes = cluster_nodes(url)
    how: dict[str, Any] = dict(parse_url(first))
    if how.get("connection_class") in (SSLConnection, UnixDomainSocketConnection):
        return ""
    for host, port in nodes or [(how.get("host", "localhost"), how.get("port", 6379))]:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not addresses.is_loopback(address):
            return address
    return ""
