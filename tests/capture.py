"""The session that README shows, from a stack that really runs: `make capture`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from supervisor import is_serving

from protos.rpc.security import PLAIN
from tests.stack import ROOT
from tests.support.patience import patience
from tests.support.ports import free_address

README = ROOT / "README.md"
BEGIN, END = "<!-- session: written by make capture -->\n", "<!-- end of session -->\n"
QUESTION = '"What is the capital of France?"'
# As a reader types them in the checkout. STACK is the process of `make run-stack`.
COMMANDS = (
    f"make generate PROMPT={QUESTION}",
    f"make generate PROMPT={QUESTION}",
    f"kvctl explain --chat {QUESTION}",
    f"kvctl explain --chat {QUESTION} --salt acme",
    f"kvctl pin --chat {QUESTION} --for 1h --owner ops",
    'make generate PROMPT="Tell me a story." > story.txt &',
    "until [ -s story.txt ]; do sleep 0.1; done; kill -9 $(pgrep -P $STACK -f cachemgr)",
    "wait; grep again run-stack.log",
    "kvctl fsck",
    "kvctl holds",
)
START_SECONDS, STOP_SECONDS = 120.0, 60.0
PROCESSES = ("SCHEDULER", "CACHEMGR", "CACHEMGR_ADMIN", "EXECUTOR")


@contextlib.contextmanager
def stack(folder: Path) -> Iterator[dict[str, str]]:
    """`make run-stack` with a separate state folder and separate ports; the environment of a second terminal."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVKEEP_", "KVCTL_"))}
    environment |= {f"KVKEEP_{name}_ADDRESS": free_address() for name in PROCESSES}
    environment |= {f"KVKEEP_{name}_METRICS_ADDRESS": "" for name in ("SCHEDULER", "CACHEMGR", "EXECUTOR")}
    environment |= {
        "KVKEEP_SCHEDULER_HTTP_ADDRESS": free_address(),
        "KVKEEP_CONSOLE_ADDRESS": "",
        "KVKEEP_EXECUTOR_MAX_TOKENS": "8192",
        "KVKEEP_STATE_DIR": str(folder / "state"),
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with (folder / "run-stack.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "ops/run_stack.py"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + patience(START_SECONDS)
            while not is_serving(environment["KVKEEP_SCHEDULER_ADDRESS"], PLAIN):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the stack did not start\n{(folder / 'log').read_text()}")
                time.sleep(0.1)
            yield environment | {"STACK": str(process.pid)}
        finally:
            process.terminate()
            process.wait(patience(STOP_SECONDS))


def session() -> str:
    """Runs all commands and shows their output as on a terminal. Raises RuntimeError if a command fails."""
    with tempfile.TemporaryDirectory() as name, stack(Path(name)) as environment:
        # The environment that runs this is the one to use: with VENV nothing is installed.
        make = f'make() {{ command make -s -C {ROOT} VENV={sys.prefix} "$@"; }}'
        kvctl = 'kvctl() { python -m kvctl "$@"; }'
        lines = [make, kvctl, "set -o errexit"]
        for number, command in enumerate(COMMANDS):
            lines += [f"printf '%s\\n' {number}:", command]
        shell = subprocess.run(
            ["bash", "--norc"],
            input="\n".join(lines),
            cwd=name,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(START_SECONDS),
            check=False,
        )
    if shell.returncode:
        raise RuntimeError(shell.stdout)
    printed = re.split(r"^\d+:\n", shell.stdout, flags=re.MULTILINE)[1:]
    text = "".join(f"$ {command}\n{output}" for command, output in zip(COMMANDS, printed, strict=True))
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def shown(readme: str) -> str:
    """The session in the text of README."""
    return readme.partition(BEGIN)[2].partition(END)[0].removeprefix("```text\n").removesuffix("```\n")


def main() -> None:
    """Writes it into README."""
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}```text\n{session()}```\n{END}{after}")


if __name__ == "__main__":
    main()
