"""A third-party program in a separate environment."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.set_up import Peer, peer_environment

RUN_SECONDS = 1800


class ProgramError(Exception):
    """The program failed; the message says where its output is."""


class Target(NamedTuple):
    """The server under test. folder: of its model and tokenizer. admin: the cache manager's address for operators."""

    url: str
    model: str
    folder: Path
    admin: str


class Program(ABC):
    """One third-party program."""

    def __init__(self, peer: Peer, environments: Path) -> None:
        self.peer = peer
        self._python = peer.python(environments)

    @abstractmethod
    def run(self, target: Target, folder: Path) -> dict[str, Any]:
        """Measures a server; returns the figures. folder: for the program's files. Raises ProgramError."""

    def shown(self, figures: Mapping[str, Any]) -> str:
        """Returns the figures as text."""
        return "\n".join(f"{name}: {value:g}" for name, value in figures.items())

    def call(self, folder: Path, *arguments: str) -> None:
        """Runs the program's interpreter with these arguments; its output goes into a log. Raises ProgramError."""
        log = folder / f"{self.peer.name}.log"
        more = {"HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("a") as out:
            try:
                subprocess.run(
                    [str(self._python), *arguments],
                    env=peer_environment() | more,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    timeout=RUN_SECONDS,
                    check=True,
                )
            except subprocess.CalledProcessError as error:
                raise ProgramError(f"ended with status {error.returncode}, see {log}") from None
            except subprocess.TimeoutExpired:
                raise ProgramError(f"took longer than {RUN_SECONDS} s, see {log}") from None
