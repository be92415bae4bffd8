"""Settings of the scheduler process."""

import re
import socket
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from protos.rpc.settings import MetricsAddress, OptionalPath, ProcessSettings

MOST_FRONT_ENDS = 64
MAX_NAME_BYTES = 256
# Forms in which models write; a router has the same settings.
ToolCallForm = Annotated[
    Literal["auto", "hermes", "llama3_json", "pythonic", "mistral", "none"],
    Field(
        description="The form in which the model writes calls of tools: `hermes`, `llama3_json`, `pythonic` or "
        "`mistral`. `auto` is what its chat template shows, `none` leaves calls in the text."
    ),
]
ReasoningForm = Annotated[
    Literal["auto", "think_tags", "none"],
    Field(
        description="The form in which the model writes its reasoning: `think_tags`. `auto` is what its chat template "
        "shows, `none` leaves reasoning in the text."
    ),
]
_ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?")


def _origins(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = tuple(origin for part in value.split(",") if (origin := part.strip()))
    for origin in found:
        if not _ORIGIN.fullmatch(origin) and found != ("*",):
            raise ValueError("must be origins like https://chat.example.com with commas between them, or * alone")
    return found


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = tuple(name for part in value.split(",") if (name := part.strip()))
    if len(set(found)) < len(found):
        raise ValueError("has a name twice")
    if not all(name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES for name in found):
        raise ValueError(f"must be printable names of at most {MAX_NAME_BYTES} bytes with commas between them")
    return found


def _front_ends(value: object) -> object:
    if isinstance(value, str) and value != "auto":
        if not value.isascii() or not value.isdecimal() or int(value) > MOST_FRONT_ENDS:
            raise ValueError(f"must be auto or a number from 0 to {MOST_FRONT_ENDS}")
        return int(value)
    return value


class HttpSettings(ProcessSettings):
    """Settings of a process that serves OpenAI's API."""

    http_address: MetricsAddress = Field("", description="Where it serves OpenAI's API over HTTP; empty is off.")
    http_allowed_origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] = Field(
        (),
        description="Web pages that may call it, by origin: `https://chat.example.com,http://10.0.0.7:3000`, or `*`. "
        "Pages of this machine may always call a loopback address.",
    )
    served_model_names: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (),
        description="Names that requests may call the model, with commas between them; answers show the first. Empty "
        "means the model's own name and, if known, its id on a hub. Otherwise, these two count only if listed.",
    )
    max_prompt_bytes: int = Field(4 << 20, ge=1, description="Longest prompt text in bytes of UTF-8.")

    @field_validator("http_allowed_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # These settings are absent if they are invalid themselves.
        if "*" in origins and not info.data.get("insecure", True) and info.data.get("tokens_file") is None:
            raise ValueError(
                "* lets every web page that is open on this machine use the model: name the pages' origins, "
                "give KVKEEP_TOKENS_FILE, or allow it with KVKEEP_INSECURE=1"
            )
        return origins


class SchedulerSettings(HttpSettings):
    """Own fields are variables KVKEEP_SCHEDULER_<NAME>; those shared by all processes KVKEEP_<NAME>."""

    process: ClassVar[str] = "scheduler"
    listens_on: ClassVar[tuple[str, ...]] = ("scheduler_address", "http_address", "metrics_address")

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
    frontends: Annotated[Literal["auto"] | int, BeforeValidator(_front_ends)] = Field(
        "auto",
        description="Processes that serve the HTTP API for the scheduler; with 0, the scheduler serves it itself. "
        "`auto` is one per four cores that the scheduler may use, at most four.",
    )
    vllm_metrics: bool = Field(False, description="Serve metrics under vLLM's names, too.")
    kv_events: bool = Field(
        False,
        description="Tell gateways that call vLLM's engine contract which blocks are cached, with their token ids.",
    )
    access_log: OptionalPath = Field(None, description="File with a JSON line per request; empty is the usual log.")
    max_batched_tokens: int = Field(512, ge=1, le=65536, description="Most tokens of a step.")
    target_itl_seconds: float = Field(
        0.0,
        ge=0,
        description="Inter-token latency that prefill may cause; 0 is 1.4 times that of decoding alone for one prompt.",
    )
    max_running: int = Field(64, ge=1, le=4096, description="Most samples in the running batch.")
    max_waiting: int = Field(256, ge=1, description="Most samples in the waiting queue; further requests are refused.")
    max_tenant_requests: int = Field(0, ge=0, description="Most live requests of a tenant; 0 is no bound.")
    tool_call_parser: ToolCallForm = "auto"
    reasoning_parser: ReasoningForm = "auto"
    onload_timeout_seconds: float = Field(
        10.0,
        gt=0,
        description="Longest wait of a request for blocks from host memory or disk; then it computes their tokens.",
    )
    drain_seconds: float = Field(30.0, ge=0, description="Longest time that running requests may go on after SIGTERM.")
