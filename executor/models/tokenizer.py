"""The tokenizer in the form that other processes need: files and strings, no objects of a library."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from transformers import AutoTokenizer

from executor.errors import ModelError, first_line
from executor.models.chat_template import read_template
from executor.models.files import ModelFiles
from executor.models.gguf.file import GgufFile
from executor.models.gguf.tokenizer import build_tokenizer, special_tokens

log = structlog.get_logger()

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """json: of the `tokenizers` library. chat_template: Jinja. Empty if the model has none."""

    json: bytes = b""
    chat_template: str = ""
    special_tokens: Mapping[str, str] | None = None


def load_tokenizer(files: ModelFiles, template: Path | None = None) -> TokenizerFiles:
    """Loads the tokenizer; without one, the model takes only token ids.

    template: the file of a chat template that replaces the model's. Raises ModelError for a damaged tokenizer, or a
    template that cannot be used.
    """
    found = _of_gguf(GgufFile(Path(files.source))) if files.is_gguf else _of_folder(files)
    return found if template is None else replace(found, chat_template=read_template(template))


def _of_folder(files: ModelFiles) -> TokenizerFiles:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(files.source, trust_remote_code=False)
    # Any exception: the library that reads the file raises nothing narrower.
    except Exception as error:
        if Path(files.source, "tokenizer.json").exists():
            raise ModelError(
                f"cannot read the tokenizer of {files.source}: {first_line(error)}; tokenizer.json or "
                "tokenizer_config.json may be damaged: compare them with their origin, or download them again"
            ) from error
        log.warning("model without tokenizer: only token ids can be used", cause=str(error))
        return TokenizerFiles()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        log.warning("model without a fast tokenizer: only token ids can be used", kind=type(tokenizer).__name__)
        return TokenizerFiles()
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = _joined(template.get("default", ""), template.get("tool_use", ""))
    special = {name: str(value) for name in _SPECIAL if (value := getattr(tokenizer, name, None)) is not None}
    return TokenizerFiles(backend.to_str().encode(), template or "", special)


def _joined(default: str, with_tools: str) -> str:
    """Returns one chat template for both: `with_tools` renders conversations with tools."""
    if not default or not with_tools:
        return default or with_tools
    # Jinja drops the line break after a block's tag, and the last line break of a template.
    first, second = (text.removesuffix("\n") for text in (with_tools, default))
    return f"{{% if tools %}}\n{first}{{% else %}}\n{second}{{% endif %}}"


def _of_gguf(file: GgufFile) -> TokenizerFiles:
    tokenizer = build_tokenizer(file)
    if tokenizer is None:
        log.warning("model without tokenizer: only token ids can be used", cause="the GGUF file has none")
        return TokenizerFiles()
    default, with_tools = (
        str(file.metadata.get(f"tokenizer.chat_template{suffix}", "")) for suffix in ("", ".tool_use")
    )
    template = _joined(default, with_tools)
    return TokenizerFiles(tokenizer.to_str().encode(), template, special_tokens(file))
