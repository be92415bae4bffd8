"""Settings of the cache manager, KVKEEP_CACHEMGR_<NAME> beside the shared ones."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from protos.rpc.settings import MetricsAddress, ProcessSettings


class CachemgrSettings(ProcessSettings):
    """Read once by __main__."""

    process: ClassVar[str] = "cachemgr"

    metrics_address: MetricsAddress = Field("", description="Where Prometheus reads metrics; empty is off.")
    lease_seconds: float = Field(10.0, gt=0, description="Time after which a silent executor or scheduler is gone.")
    capacity_ahead_tokens: int = Field(32, ge=0, description="Capacity that running sequences get ahead of need.")
    free_watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of a pool that capacity ahead and admissions leave free."
    )
    redis_flush_seconds: float = Field(0.05, gt=0, description="How long changes of the index gather before a write.")
    redis_max_pending: int = Field(
        200_000, gt=0, description="Changed blocks that wait for Redis; beyond it the index is copied later."
    )
    operation_log: Path | None = Field(
        None, description="New file for every call with its token ids, to be replayed; empty is off."
    )
    drain_seconds: float = Field(10.0, ge=0, description="Time that running calls get when the process stops.")
