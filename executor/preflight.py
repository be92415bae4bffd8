"""Quick checks of an executor's settings: without torch, and before a stack has started anything."""

import importlib.util
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

from executor.cache.tiers.files import FileSettings, check_space
from executor.errors import ModelError
from executor.models import files
from executor.models.chat_template import read_template
from executor.settings import ExecutorSettings
from protos.rpc.settings import variable

# Each driver of a GPU that torch calls "cuda" has one of these files: NVIDIA's, the driver for Linux in Windows (WSL),
# Jetson's and AMD's. NVIDIA has two, since the first program that uses its devices may create the device files.
_DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/nvmap", "/dev/kfd")))


def check(settings: ExecutorSettings, environ: Mapping[str, str]) -> None:
    """Raises ModelError or CacheFileError, which name the variable and a remedy, if no executor could start."""
    check_device(settings.device, environ)
    for tier in tier_files(settings):
        check_space(tier)
    models = {"model": settings.model} | ({"draft_model": settings.draft_model} if settings.draft_model else {})
    for field, model in models.items():
        try:
            files.check(model)
        except ModelError as error:
            raise ModelError(f"{variable(ExecutorSettings, field)}: {error}") from error
    if settings.chat_template is not None:
        try:
            read_template(settings.chat_template)
        except ModelError as error:
            raise ModelError(f"{variable(ExecutorSettings, 'chat_template')}: {error}") from error
    for name, folder in settings.given_adapters.items():
        if not Path(folder).expanduser().is_dir():
            raise ModelError(
                f"{variable(ExecutorSettings, 'adapters')}: the adapter {name} cannot be loaded: "
                f"there is no folder {folder}; name a folder in PEFT's form"
            )


def check_device(device: str, environ: Mapping[str, str], drivers: Sequence[Path] = _DRIVERS) -> None:
    """Raises ModelError for a GPU that certainly does not exist. With a driver, torch finds out how many there are."""
    if not device.startswith("cuda"):
        return
    if not any(driver.exists() for driver in drivers):
        cause = (
            f"there is no driver of a GPU here ({drivers[0]} is missing): install the driver, or give the container "
            "the GPU"
        )
    elif environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        cause = "CUDA_VISIBLE_DEVICES hides every GPU: unset the variable"
    elif (version := _torch_version()) is not None and not computes_on_gpus(version):
        cause = "the installed torch computes on CPUs only: install a torch for the GPU"
    else:
        return
    raise ModelError(
        f"{variable(ExecutorSettings, 'device')}: {device} needs a GPU, and {cause}; or choose auto or cpu"
    )


def _torch_version() -> Path | None:
    """Returns the file in which torch says how it was built, if it exists."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found and found.origin else None
    return path if path and path.is_file() else None


def computes_on_gpus(version: Path) -> bool:
    """Returns whether a torch with this version.py was built for GPUs."""
    built = runpy.run_path(str(version))
    return bool(built.get("cuda") or built.get("hip"))


def tier_files(settings: ExecutorSettings) -> tuple[FileSettings, FileSettings]:
    """Returns the settings of the host tier's file and of the disk tier's file."""

    def of(tier: str, folder: Path) -> FileSettings:
        size, where = f"{tier}_cache_size", f"{tier}_cache_dir"
        return FileSettings(
            folder,
            getattr(settings, size),
            variable(ExecutorSettings, where),
            variable(ExecutorSettings, size),
            in_memory=tier == "host",
        )

    return of("host", settings.host_cache_dir), of("disk", settings.disk_dir)
