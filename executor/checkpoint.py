"""From a model's folder to a transformers decoder whose every weight comes from the checkpoint, or a sentence."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from executor import attention
from executor.errors import FamilyError, ModelError, first_line

# Names of weights that a message repeats.
_SHOWN = 3


def load_decoder(source: str, dtype: Any) -> Any:
    """The decoder of a folder or a hub id, on the CPU; dtype: of torch, or "auto" for that of the file.

    Raises ModelError where the checkpoint is not all of one decoder: weights that are missing, left over or of other
    shapes, an adapter, an encoder, a format that transformers cannot read here.
    """
    _check_folder(source)
    # Its bars are no log lines, and its table of weights that do not fit becomes one sentence.
    transformers_logging.disable_progress_bar()
    transformers_logging.get_logger("transformers.modeling_utils").setLevel(transformers_logging.ERROR)
    config = _configuration(source)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            # Else it raises without naming them.
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"there is no room for the model {source}: {first_line(error)}") from error
    # Any exception: families and formats bring code of their own, and none of it may end in a traceback.
    except Exception as error:
        raise _unreadable(source, config, error) from error
    if (method := _quantized(module.config)) and getattr(module, "hf_quantizer", None) is None:
        raise ModelError(
            f"the weights of {source} are quantised by {method}, which the installed transformers does not know: "
            "serve the model's unquantised weights"
        )
    _check_weights(source, module, info)
    return module


def _check_folder(source: str) -> None:
    """Raises ModelError for a folder that is recognisably something else. A hub id is left to transformers."""
    folder = Path(source)
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    if (folder / "adapter_config.json").exists():
        raise _adapter(source)
    if files := sorted(folder.glob("*.gguf")):
        raise ModelError(
            f"the folder {source} holds a GGUF file, which is not served as it is: convert it with transformers, "
            f"from_pretrained(folder, gguf_file={files[0].name!r}) and save_pretrained(target) of AutoTokenizer and "
            "AutoModelForCausalLM, or set KVKEEP_EXECUTOR_MODEL to the original model"
        )
    raise ModelError(
        f"cannot load the model {source}: it has no config.json; "
        "set KVKEEP_EXECUTOR_MODEL to a folder of the form that transformers saves"
    )


def _adapter(source: str) -> ModelError:
    return ModelError(
        f"the model {source} comes with a LoRA adapter (adapter_config.json), which the executor does not apply: "
        "merge it into the base model with peft's merge_and_unload() and serve what that saves, "
        "or remove the adapter's files to serve the base model alone"
    )


def _configuration(source: str) -> Any:
    """The configuration, if it is that of a decoder. Raises ModelError."""
    try:
        if find_adapter_config_file(source) is not None:
            raise _adapter(source)
        config = AutoConfig.from_pretrained(source)
    except ModelError:
        raise
    except Exception as error:  # As where the weights are read.
        raise ModelError(
            f"cannot load the model {source}: {first_line(error)}; check its config.json, "
            "or whether the installed transformers knows the model"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise FamilyError(f"{config.model_type}: the model has an encoder before its decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        raise FamilyError(f"{config.model_type}: transformers knows no decoder of text alone for this family")
    return config


def _unreadable(source: str, config: Any, error: Exception) -> ModelError:
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return FamilyError(f"{config.model_type}: its attention does not go through transformers' attention interface")
    if method := _quantized(config):
        return ModelError(
            f"cannot load the model {source}, whose weights are quantised ({method}): {first_line(error)}; "
            "install what that asks for, or serve the model's unquantised weights"
        )
    return ModelError(
        f"cannot load the model {source}: {first_line(error)}; "
        "the files may be incomplete or damaged: compare them with their origin, or download them again"
    )


def _quantized(config: Any) -> str:
    """The method by which a checkpoint is quantised; empty where it is not."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return ""
    return str((found if isinstance(found, dict) else vars(found)).get("quant_method", "an unknown method"))


def _check_weights(source: str, module: Any, info: dict[str, Any]) -> None:
    """Raises ModelError unless each weight of the model has a value of the checkpoint, and each of those a place."""
    faults = [
        (info["missing_keys"], "lacks", "these would be random numbers"),
        ([name for name, *_ in info["mismatched_keys"]], "has other shapes of", "config.json describes another model"),
        (info["unexpected_keys"], "has weights that the model does not use", "config.json describes another model"),
    ]
    for names, fault, meaning in faults:
        if names:
            raise ModelError(
                f"the checkpoint {source} does not fit {type(module).__name__}: it {fault}: {_some(names)}; {meaning}: "
                f"serve a complete checkpoint of a language model{_saved_as(module)}"
            )
    if messages := info.get("error_msgs"):
        raise ModelError(f"cannot load the model {source}: {str(messages[0]).splitlines()[0]}; download it again")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _saved_as(module: Any) -> str:
    saved = [name for name in module.config.architectures or () if name != type(module).__name__]
    return f" (this is saved as {', '.join(saved)})" if saved else ""
