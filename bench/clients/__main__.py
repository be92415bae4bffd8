"""Checks that third-party clients run unchanged: lm-eval, guidellm, aiperf and vLLM's own benchmark.

`make peers ARGS="lm-eval guidellm aiperf vllm"` installs the clients first. A stack runs the default model in float32,
and each program calls the stack over HTTP, as its manual says. Exits with 1 if a program is not installed or does not
finish.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.clients.load import Aiperf, Guidellm, VllmServe
from bench.clients.program import ProgramError, Target
from bench.clients.scores import LmEval
from bench.peers.set_up import CLIENTS, default_folder
from bench.prose import NoTextError
from bench.result import Result, add_json_argument
from executor.models.files import find
from tests.stack import Stack, model_cache
from tests.support.ports import free_address

PROGRAMS = {"lm-eval": LmEval, "guidellm": Guidellm, "aiperf": Aiperf, "vllm": VllmServe}


def main() -> int:
    """Runs the named programs, by default all. Returns the exit status; a program that is not installed has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=" ".join(PROGRAMS))
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of the environments")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to leave what the programs write and print")
    add_json_argument(parser)
    given = parser.parse_args()
    if unknown := set(given.programs) - set(PROGRAMS):
        parser.error(f"there is no program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    figures, failed = {}, 0
    model = find("", model_cache())
    with (
        tempfile.TemporaryDirectory() as scratch,
        Stack(executor_dtype="float32", scheduler_http_address=free_address()) as stack,
    ):
        target = Target(f"http://{stack.http}", model.name, Path(model.source), stack.admin)
        for name in given.programs or PROGRAMS:
            program = PROGRAMS[name](CLIENTS[name], given.folder)
            folder = (given.keep or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            begin = time.monotonic()
            try:
                if missing := program.peer.missing(given.folder):
                    raise ProgramError(missing)
                found = program.run(target, folder)
            except (ProgramError, NoTextError) as error:
                print(f"{name}: {error}", flush=True)
                failed = 1
                continue
            seconds = time.monotonic() - begin
            print(
                f"{name}, {', '.join(program.peer.requirements)}, {seconds:.0f} s\n{program.shown(found)}\n", flush=True
            )
            figures[name] = {"requirements": program.peer.requirements, "seconds": seconds, "figures": found}
    print(f"results: {Result('clients', {'programs': figures}).write(given.json)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
