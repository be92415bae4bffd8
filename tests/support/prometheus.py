"""The distribution's Prometheus server, which reads the metrics of a running stack."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support.patience import patience
from tests.support.ports import free_address

START_SECONDS = patience(30)
SCRAPE_SECONDS = 0.5
BAD_REQUEST = 400


class Prometheus:
    """The server as a process. Use it in a with statement. `jobs`: the address that each job reads, by its name."""

    def __init__(self, folder: Path, jobs: Mapping[str, str], rules: Path) -> None:
        self.address = free_address()
        self._folder = folder
        self._jobs = jobs
        self._log = (folder / "prometheus.log").open("w+")
        configuration = {
            "global": {"scrape_interval": f"{int(SCRAPE_SECONDS * 1000)}ms", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in jobs.items()
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))

    def __enter__(self) -> Self:
        command = [
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self.wait_for(f"count(up == 1) == {len(self._jobs)}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises AssertionError with the server's message if the query is refused."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=patience(10)) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return result
        except urllib.error.HTTPError as error:
            with error:
                if error.code == BAD_REQUEST:
                    raise AssertionError(f"{expression}: {error.read().decode()}") from error
                # The server is starting.
                raise

    def wait_for(self, expression: str) -> None:
        """Waits until an expression has a series."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.query(expression):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self._log.seek(0)
        raise AssertionError(f"no {expression}\n{self._log.read()[-3000:]}")
