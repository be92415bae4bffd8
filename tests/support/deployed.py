"""What files of a deployment tell processes, held against what the processes understand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import certs
from settings_table import PROCESSES

from protos.rpc.identity import Role
from protos.rpc.security import Security
from protos.rpc.settings import ProcessSettings, load
from tests.support.keyring import Keyring

CLASSES = {cls.process: cls for cls in PROCESSES}
# What a stack takes between its drain and its end, at least.
STOP_MARGIN_SECONDS = 5.0


class Secrets:
    """Certificates and tokens under the names that a deployment gives them, in a folder in the place of its own."""

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        """names: of each file that a process is given, by what it is: ca, certificate, key, token, tokens."""
        self.folder = folder
        trusted, _ = (ca := certs.authority()).write(folder / "made", "ca")
        certificate, key = certs.certificate(ca, "process").write(folder / "made", "process")
        keyring = Keyring(folder / "made", Security())
        token = keyring.add(Role.SCHEDULER).token_file
        assert token is not None
        files = {"ca": trusted, "certificate": certificate, "key": key, "token": token, "tokens": keyring.file}
        for what, name in names.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(files[what])


def understood(process: str, environment: Mapping[str, Any]) -> ProcessSettings:
    """The settings of a process that is given these variables. What it does not know ends the test."""
    ours = {name: str(value) for name, value in environment.items() if name.startswith("KVKEEP_")}
    return load(CLASSES[process], ours)


def shortest_stop(settings: ProcessSettings) -> float:
    """How long a supervisor must let a process run after SIGTERM."""
    return float(getattr(settings, "drain_seconds", 10.0)) + STOP_MARGIN_SECONDS
