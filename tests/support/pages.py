"""Pages of documentation: their links, and their examples, which are run and must print what the page shows.

Fenced blocks of `sh` and `python` are examples. A line that begins with `#>`, in formatted Python with `# >`, shows a
part of the output of the lines since the previous such line. In it, white space does not count, and … stands for
anything; "exit status 3" is the status of a command that fails. The blocks of a page are one session: variables stay.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import pytest

from kvctl.app import main as kvctl
from tests.stack import ROOT
from tests.support.ports import free_address

DOCS = ROOT / "docs"
# The pages with examples.
WITH_EXAMPLES = [
    ROOT / "README.md",
    DOCS / "quickstart.md",
    DOCS / "api.md",
    DOCS / "grpc.md",
    DOCS / "operations.md",
    DOCS / "security.md",
]
# Without the folders that tools leave, which may have very many files.
_FOLDERS = [one for one in ROOT.iterdir() if one.is_dir() and one.name[0] != "." and one.name not in ("build", "site")]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in _FOLDERS for page in folder.rglob("*.md"))])
# The addresses of run-stack, by the setting that changes them.
PLACES = {
    "scheduler_address": "127.0.0.1:50051",
    "cachemgr_address": "127.0.0.1:50052",
    "cachemgr_admin_address": "127.0.0.1:50062",
    "executor_address": "127.0.0.1:50053",
    "scheduler_http_address": "127.0.0.1:8000",
    "scheduler_metrics_address": "127.0.0.1:9101",
    "executor_metrics_address": "127.0.0.1:9103",
}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"# ?> (.*)")
_STATUS = re.compile(r"exit status (\d+)")
# Signs of a line that only a shell can run.
_SHELL = re.compile(r"[|&;<>`\n]|\$\(")


def elsewhere() -> dict[str, str]:
    """The addresses of the pages with free ports."""
    return {setting: free_address() for setting in PLACES}


def places(addresses: dict[str, str]) -> dict[str, str]:
    """Addresses in pages, and the addresses that replace them."""
    return {PLACES[setting]: address for setting, address in addresses.items()}


class Example(NamedTuple):
    """Some lines, and parts of their output, in order."""

    place: str
    language: str
    code: str
    shown: tuple[str, ...]
    status: int


def examples(page: Path) -> Iterator[Example]:
    """All of a page."""
    text = page.read_text()
    for block in _BLOCK.finditer(text):
        language, first = block[1], text[: block.start(2)].count("\n") + 1
        if language in ("sh", "python"):
            yield from _parts(f"{page.relative_to(ROOT)}:{first}", language, block[2].splitlines())


def _parts(place: str, language: str, lines: list[str]) -> Iterator[Example]:
    code, shown, status = list[str](), list[str](), 0
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not (told := _SHOWN.fullmatch(line)):
            code.append(line)
            continue
        if found := _STATUS.fullmatch(told[1]):
            status = int(found[1])
        else:
            shown.append(told[1])
        if not _SHOWN.fullmatch(following):
            yield Example(place, language, "\n".join(code), tuple(shown), status)
            code, shown, status = [], [], 0
    if any(code):
        yield Example(place, language, "\n".join(code), (), 0)


class Reader:
    """Runs a page's examples in a separate shell and interpreter. Use it in a with statement.

    folder: where they run. places: addresses in the page, and the addresses that replace them.
    """

    def __init__(
        self, folder: Path, captured: pytest.CaptureFixture[str], places: Mapping[str, str], **environment: str
    ) -> None:
        self._folder = folder
        self._captured = captured
        self._places = places
        self._patch = pytest.MonkeyPatch()
        self._environment = environment
        self._names: dict[str, object] = {}
        for name in (".venv", "ops"):
            (folder / name).symlink_to(sys.prefix if name == ".venv" else ROOT / name)

    def __enter__(self) -> Self:
        for name in os.environ:
            if name.startswith(("KVKEEP_", "KVCTL_")):
                self._patch.delenv(name)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        for name, value in {**self._environment, "PATH": path, "PYTHONPATH": str(ROOT)}.items():
            self._patch.setenv(name, value)
        self._patch.chdir(self._folder)
        self._shell = subprocess.Popen(
            ["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._source("set -o pipefail -o errtrace; trap 'status=$?' ERR; kvctl() { python -m kvctl \"$@\"; }")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source("kill $(jobs -p) 2> /dev/null")
        self._shell.communicate("exit")
        self._patch.undo()

    def check(self, example: Example) -> None:
        """Runs an example and compares its answer with the answer on the page."""
        run = {"sh": self._run, "python": self._execute}[example.language]
        status, output = run(self._here(example.code))
        told = f"{example.place}\n{example.code}\n{output}"
        assert status == example.status, told
        rest = _squeezed(output)
        for line in example.shown:
            # A port in the page stands for the port in use.
            pattern = ".*?".join(re.escape(_squeezed(self._here(part))) for part in line.split("…"))
            found = re.search(pattern, rest, re.DOTALL)
            assert found, f"{line}\nis not shown by {told}"
            rest = rest[found.end() :]

    def variables(self, prefix: str) -> dict[str, str]:
        """Variables of the shell's environment with a prefix."""
        _, text = self._source("env")
        pairs = (line.partition("=") for line in text.splitlines() if line.startswith(prefix))
        return {name: value for name, _, value in pairs}

    @property
    def is_busy(self) -> bool:
        """Whether a process runs in the background."""
        return bool(self._source("jobs -pr")[1].strip())

    def _here(self, text: str) -> str:
        there = "|".join(map(re.escape, self._places))
        return re.sub(there, lambda found: self._places[found[0]], text) if there else text

    def _run(self, code: str) -> tuple[int, str]:
        last = code.splitlines()[-1]
        if not last.startswith("kvctl ") or _SHELL.search(last):
            return self._source(code)
        # kvctl runs in this process: a new process takes longer than the work of most verbs.
        status, before = self._source(code.removesuffix(last))
        for name, value in self.variables("KVKEEP_").items():
            self._patch.setenv(name, value)
        _, words = self._source(f"printf '%q ' {last}")
        self._captured.readouterr()
        status = kvctl(shlex.split(words)[1:]) or status
        return status, before + "".join(self._captured.readouterr())

    def _source(self, code: str) -> tuple[int, str]:
        """Lets the shell run lines; returns the last status that was not 0, and the output."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        end, step = secrets.token_hex(8), self._folder / ".step"
        step.write_text(code + "\n")
        self._shell.stdin.write(f"status=0; . ./.step < /dev/null; printf '%s %d\\n' {end} $status\n")
        self._shell.stdin.flush()
        output = ""
        for line in self._shell.stdout:
            text, found, status = line.partition(end)
            output += text
            if found:
                return int(status), output
        raise AssertionError(f"the shell has ended:\n{code}\n{output}")

    def _execute(self, code: str) -> tuple[int, str]:
        self._captured.readouterr()
        exec(compile(code, "<page>", "exec"), self._names)
        return 0, self._captured.readouterr().out


def _squeezed(text: str) -> str:
    """A text without the white space that depends on how it is printed."""
    return re.sub(r"\s", "", text)
