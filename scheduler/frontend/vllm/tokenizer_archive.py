"""The tokenizer as a zip archive of the files that gateways' libraries read."""

import io
import json
import zipfile

from protos.execution.v1 import execution_pb2


def archive(model: execution_pb2.GetModelResponse) -> bytes:
    """Returns the archive, which is equal for equal models: its files have no date."""
    config: dict[str, str] = dict(model.special_tokens)
    if model.chat_template:
        config["chat_template"] = model.chat_template
    files = {
        "tokenizer.json": model.tokenizer_json,
        "tokenizer_config.json": json.dumps(config, sort_keys=True).encode(),
        # Gateways look here for the ids that end an output.
        "config.json": json.dumps({"eos_token_id": list(model.eos_token_ids)}).encode(),
    }
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as opened:
        for name, content in files.items():
            opened.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return written.getvalue()
