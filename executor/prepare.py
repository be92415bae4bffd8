"""Prepares what the first start would otherwise make: the configured model's files, and code for this machine.

`python -m executor.prepare` prints the model's folder.
"""

import os

from executor.models.files import find
from executor.settings import settings_from
from kernels.cpu_decoder import build
from protos.rpc import logs
from protos.rpc.startup import process_parser


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    process_parser(
        "python -m executor.prepare",
        "Makes in advance what the executor's first start would make: the files of the configured model, whose\n"
        "folder is printed, and the decoder compiled for this machine.",
    ).parse_args()
    settings = settings_from(os.environ)
    logs.configure("executor", settings.log_level)
    try:
        _say("compiling the decoder for this machine")
        build.load(settings.compiled_dir)
    except build.BuildError as error:
        _say(f"using torch alone, which is slower on a CPU: {error}")
    _say(find(settings.model, settings.cache_dir, _say).source)
