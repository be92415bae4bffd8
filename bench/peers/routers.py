"""Third-party routers as processes, and JSON over HTTP to routers and engines."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from bench.peers.set_up import peer_environment


class RouterError(RuntimeError):
    """A router or an engine does not answer as it must; the message says how."""


class Connection:
    """A connection to one address, reused for each request. One thread uses it at a time."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=300)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str) -> Any:
        """The answer's JSON. Raises RouterError and OSError."""
        return json.loads(self.read("GET", path))

    def post(self, path: str, **body: object) -> Any:
        """The answer's JSON. Raises RouterError and OSError."""
        return json.loads(self.read("POST", path, json.dumps(body)))

    def read(self, method: str, path: str, body: str | None = None) -> str:
        """The answer's text. Raises RouterError and OSError."""
        try:
            self._connection.request(method, path, body, {"content-type": "application/json"})
            response = self._connection.getresponse()
            text = response.read().decode()
        except BaseException:
            # The connection may be in the middle of an answer.
            self._connection.close()
            raise
        if response.status >= 300:
            raise RouterError(f"{path}: {response.status} {text}")
        return text

    def close(self) -> None:
        self._connection.close()


class RouterProcess(Connection):
    """A router that serves HTTP and the connection to it. Use it in a with statement."""

    def __init__(self, command: Sequence[str], address: str, log: Path) -> None:
        """Starts the router; the log has its output."""
        super().__init__(address)
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = peer_environment() | {"RUST_LOG": "warn", "NO_COLOR": "1"}
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def wait(self) -> None:
        """Waits until the router answers. Raises RouterError."""
        for _ in range(600):
            try:
                self.read("GET", "/health")
            except (OSError, http.client.HTTPException, RouterError):
                # Not yet, or not healthy yet.
                time.sleep(0.1)
            else:
                return
            if self._process.poll() is not None:
                break
        raise RouterError(f"the router does not answer, see {self._log}")

    def close(self) -> None:
        """Ends the router."""
        super().close()
        self._process.terminate()
        self._process.wait()
