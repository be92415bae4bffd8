"""Settings of the scheduler process."""

import socket
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from protos.rpc.settings import MetricsAddress, ProcessSettings


class SchedulerSettings(ProcessSettings):
    """Own fields are variables KVKEEP_SCHEDULER_<NAME>; those shared by all processes KVKEEP_<NAME>."""

    process: ClassVar[str] = "scheduler"

    scheduler_id: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=128,
        description="Stable name at the cache manager and the executor.",
    )
    metrics_address: MetricsAddress = Field("", description="Where Prometheus reads metrics; empty is off.")
    http_address: MetricsAddress = Field(
        "127.0.0.1:8000", description="Where the scheduler serves OpenAI's API over HTTP; empty is off."
    )
    vllm_metrics: bool = Field(False, description="Serve metrics under the names that vLLM gives them, too.")
    access_log: Path | None = Field(None, description="File with a JSON line per request; empty is the usual log.")
    max_batched_tokens: int = Field(512, ge=1, le=65536, description="Tokens per step at most.")
    target_inter_token_seconds: float = Field(
        0.0,
        ge=0,
        description="Time between tokens that prompts may cause; 0 is 1.4 times decoding alone for one prompt.",
    )
    max_running: int = Field(64, ge=1, le=4096, description="Samples that hold blocks at a time.")
    max_waiting: int = Field(256, ge=1, description="Samples that may wait for blocks before requests are refused.")
    max_tenant_requests: int = Field(0, ge=0, description="Live requests that one tenant may have; 0 is no bound.")
    max_prompt_bytes: int = Field(4 << 20, ge=1, description="Longest prompt text in bytes of UTF-8.")
    onboarding_timeout_seconds: float = Field(
        10.0, gt=0, description="How long a request waits for blocks from host memory or disk before it computes them."
    )
    drain_seconds: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM.")
