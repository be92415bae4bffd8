"""The executor's own settings, KVKEEP_EXECUTOR_<NAME>."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ByteSize, Field, ValidationInfo, field_validator

from protos.rpc.settings import MetricsAddress, OptionalPath, ProcessSettings, load, variable

# A number of at most two digits: torch keeps it in a byte.
_DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,2})?")


class ExecutorSettings(ProcessSettings):
    """Model, device and memory of an executor."""

    process: ClassVar[str] = "executor"
    listens_on: ClassVar[tuple[str, ...]] = ("executor_address", "metrics_address")

    executor_id: str = Field("executor-0", min_length=1, max_length=256, description="Stable name of this executor.")
    model: str = Field("", description="Folder, GGUF file or hub id; empty is SmolLM2-135M-Instruct.")
    chat_template: OptionalPath = Field(
        None, description="File with a chat template in Jinja; empty is the model's template."
    )
    device: str = Field("auto", description='"auto", "cpu", "cuda" or "cuda:N".')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description='Of the weights; "auto": the model\'s own, on a CPU bfloat16 or, if that is slow, float32.',
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = Field(
        "auto",
        description='Of keys and values; "auto": as the weights. "fp8" (float8_e4m3fn) and "int8" are rounded a little '
        "and take half the memory of bfloat16.",
    )
    kv_scales: Literal["calibrated", "checkpoint", "one"] = Field(
        "calibrated",
        description='Of keys and values in 8 bits. "calibrated": measured at the first start and kept in the cache '
        'folder. For "fp8" only, "checkpoint": `k_scale` and `v_scale` of the model\'s files, and "one": 1.0.',
    )
    block_size: int = Field(16, ge=2, le=1024, description="Tokens per block, a power of two.")
    max_tokens: int = Field(
        0, ge=0, description="Most tokens that the pools hold in every layer; 0 is as many as fit on the device."
    )
    free_memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share, for the pools, of the device memory that the weights and the largest step leave free; on a "
        "CPU, of at most 4 GiB of free memory.",
    )
    max_batched_tokens: int = Field(
        2048,
        ge=1,
        le=65536,
        description="Most tokens of a step on a GPU, which keeps memory free for such a step of up to 256 sequences. "
        "A scheduler that is set to more sends no more. On a CPU, the scheduler alone bounds steps.",
    )
    expected_tokens: int = Field(
        2048,
        ge=1,
        description="Usual length of a sequence, prompt and output. Its blocks in each layer group decide the shares "
        "of memory of the groups' pools.",
    )
    pool_shares: str = Field(
        "", description="Fixed shares of memory of the layer groups, as `3,1`; empty is by expected length."
    )
    batch_invariant: bool = Field(
        False, description="Compute each token alike in every batch and with every prefix hit; compiled CPU code only."
    )
    max_drafts: int = Field(
        0,
        ge=0,
        le=63,
        description="Most tokens that a step drafts for a sequence, from what followed the same tokens before; 0 is "
        "none. Output stays the same but for rounding. CPU only.",
    )
    draft_model: str = Field(
        "",
        description="Folder, GGUF file or hub id of a smaller model with the same vocabulary, which drafts where it is "
        "likelier to be right; empty is none.",
    )
    threads: int = Field(0, ge=0, description="Threads for CPU work; 0 is one per core.")
    metrics_address: MetricsAddress = Field("", description="Where Prometheus reads metrics; empty is off.")
    cache_dir: Path = Field(
        default_factory=lambda: Path("~/.cache/kvkeep").expanduser(),
        description="Folder for converted models, calibrated scales and compiled code.",
    )

    adapters: str = Field("", description="LoRA adapters to load at the start: `name=folder,name=folder`.")
    adapter_dir: OptionalPath = Field(
        None, description="Folder below which adapters may be loaded at run time; empty allows none."
    )
    weights_dir: OptionalPath = Field(
        None, description="Folder below which other weights may be loaded at run time; empty allows none."
    )
    max_adapters: int = Field(16, ge=0, le=1024, description="Most adapters that can be loaded at a time.")
    max_adapter_rank: int = Field(64, ge=1, le=1024, description="Largest rank of an adapter.")

    host_cache_size: ByteSize = Field(ByteSize(0), description="Bytes of the host tier, also as `8GiB`; 0 is none.")
    host_cache_dir: Path = Field(Path("/dev/shm/kvkeep"), description="Folder of the host tier's file, in memory.")  # noqa: S108
    disk_cache_size: ByteSize = Field(ByteSize(0), description="Bytes of the disk tier; 0 is none.")
    disk_cache_dir: OptionalPath = Field(
        None, description="Folder of the disk tier's file; empty is `blocks` in the cache folder."
    )
    cache_checksums: bool = Field(True, description="Verify checksums of blocks onloaded from lower tiers.")

    @property
    def compiled_dir(self) -> Path:
        """The folder of code compiled for this machine."""
        return self.cache_dir / "compiled"

    @property
    def scales_dir(self) -> Path:
        """The folder of calibrated scales."""
        return self.cache_dir / "scales"

    @property
    def disk_dir(self) -> Path:
        """The folder of the disk tier's file."""
        return self.disk_cache_dir or self.cache_dir / "blocks"

    @property
    def given_shares(self) -> tuple[float, ...]:
        """Shares of memory of the layer groups; empty if none are given."""
        return tuple(map(float, self.pool_shares.split(","))) if self.pool_shares else ()

    @property
    def given_adapters(self) -> dict[str, str]:
        """Folders of the adapters to load at the start, by name."""
        pairs = (pair.partition("=") for pair in self.adapters.split(",") if pair.strip())
        return {name.strip(): path.strip() for name, _, path in pairs}

    @field_validator("adapters")
    @classmethod
    def _are_pairs(cls, value: str) -> str:
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        names = [name.strip() for name, _, path in pairs if path.strip()]
        if not all(names) or len(names) < len(pairs):
            raise ValueError("must be name=folder with commas between them")
        if len(set(names)) < len(names):
            raise ValueError("must not give two folders for one name")
        return value

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:N, not {value}")
        return value

    @field_validator("kv_scales")
    @classmethod
    def _has_such_scales(cls, value: str, info: ValidationInfo) -> str:
        if value != "calibrated" and info.data.get("kv_cache_dtype", "fp8") != "fp8":
            setting = variable(cls, "kv_cache_dtype")
            raise ValueError(f"{value} needs fp8 in {setting}: int8 takes calibrated scales, and other types have none")
        return value

    @field_validator("draft_model")
    @classmethod
    def _may_draft(cls, value: str, info: ValidationInfo) -> str:
        if value and not info.data.get("max_drafts", 1):
            raise ValueError(f"drafts nothing while {variable(cls, 'max_drafts')} is 0")
        return value

    @field_validator("pool_shares")
    @classmethod
    def _are_numbers(cls, value: str) -> str:
        try:
            shares = [float(share) for share in value.split(",")] if value else []
        except ValueError:
            shares = [0.0]
        if not all(0 < share < math.inf for share in shares):
            raise ValueError("must be numbers above zero with commas between them")
        return value

    @field_validator("chat_template", "disk_cache_dir", "adapter_dir", "weights_dir", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


def settings_from(environ: Mapping[str, str]) -> ExecutorSettings:
    """Reads the settings from an environment; XDG_CACHE_HOME moves the cache folder unless its own variable does."""
    values = dict(environ)
    if environ.get("XDG_CACHE_HOME"):
        values.setdefault("KVKEEP_EXECUTOR_CACHE_DIR", str(Path(environ["XDG_CACHE_HOME"], "kvkeep")))
    return load(ExecutorSettings, values)
