"""Names of the fields that requests of other servers and their messages have, from published packages.

`pip download --no-deps vllm sglang`, then `python -m tests.support.peer_fields vllm-*.whl sglang-*.whl` writes the
names again. A test compares each name with our treatment of it in requests.
"""

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_suffix(".json")
# Modules of a package with the classes of its requests and messages.
FOLDERS = {"vllm": ("vllm/entrypoints/", "vllm/renderers/"), "sglang": ("sglang/srt/entrypoints/",)}
# Route, or a field of requests -> its class.
CLASSES = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "messages": "Message",
    "stream_options": "StreamOptions",
}
# The classes of fields with several possible types. vLLM passes a message to the template as a ConversationMessage.
UNIONS = {
    "Message": (
        "CustomChatCompletionMessageParam",
        "ConversationMessage",
        "ChatCompletionMessageGenericParam",
        "ChatCompletionMessageUserParam",
    ),
    "TokenizeRequest": ("TokenizeRequest", "TokenizeCompletionRequest", "TokenizeChatRequest"),
}
# Not for callers: pydantic's own, and fields that begin with an underscore.
PRIVATE = ("model_config",)


def of_wheel(wheel: Path) -> tuple[str, str, dict[str, list[str]]]:
    """Package, version, and field names by route, sorted."""
    package, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        files = [
            name
            for name in archive.namelist()
            if name.startswith(FOLDERS[package]) and name.endswith(".py") and "responses" not in name
        ]
        classes = {node.name: node for name in files for node in _classes(archive.read(name))}
    found = {}
    for route, name in CLASSES.items():
        fields = {field for one in UNIONS.get(name, (name,)) for field in _fields(classes, one)}
        if fields:
            found[route] = sorted(fields)
    return package, version, found


def _classes(source: bytes) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def _fields(classes: Mapping[str, ast.ClassDef], name: str) -> Iterator[str]:
    node = classes.get(name)
    if node is None:
        return
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from _fields(classes, base.id)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            field, kind = line.target.id, ast.unparse(line.annotation)
            if not field.startswith("_") and field not in PRIVATE and "ClassVar" not in kind:
                yield field


def read() -> dict[str, dict[str, Any]]:
    """The recorded fields: package -> {"version": ..., "fields": {route: names}}."""
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())
    return kept


def main() -> None:
    """Writes peer_fields.json."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.peer_fields",
        description=f"Writes {KEPT.name} from published wheels, one of each: {', '.join(FOLDERS)}.",
        allow_abbrev=False,
    )
    parser.add_argument("wheels", metavar="WHEEL", nargs="+", type=Path, help="as `pip download --no-deps` leaves it")
    told = {}
    for wheel in parser.parse_args().wheels:
        if wheel.name.split("-")[0] not in FOLDERS or not zipfile.is_zipfile(wheel):
            parser.error(f"{wheel} is no wheel of {' or '.join(FOLDERS)}")
        package, version, found = of_wheel(wheel)
        told[package] = {"version": version, "fields": found}
    if missing := set(FOLDERS) - set(told):
        parser.error(f"name a wheel of {' and of '.join(sorted(missing))}, too")
    KEPT.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
