"""`kvctl console` as a process."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.stack import ROOT
from tests.support.patience import patience
from tests.support.ports import free_address


def start(*line: str, **settings: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVKEEP_", "KVCTL_"))}
    command = [sys.executable, "-m", *line]
    return subprocess.Popen(command, env=kept | settings, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("line", [("kvctl.console",), ("kvctl", "console", "--address", "{address}")])
def test_it_serves_until_it_is_stopped_and_says_that_the_cache_manager_is_away(
    line: tuple[str, ...], tmp_path: Path
) -> None:
    address = free_address()
    settings = {"KVKEEP_CACHEMGR_ADMIN_ADDRESS": f"unix:{tmp_path}/admin", "KVKEEP_CONSOLE_ADDRESS": address}
    with start(*(word.format(address=address) for word in line), **settings) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["address"] == address
        with urllib.request.urlopen(f"http://{address}/", timeout=patience(10)) as page:
            assert "kvkeep console" in page.read().decode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{address}/api/pools", timeout=patience(20))
        assert refused.value.code == 503
        refused.value.close()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=patience(20))
    assert (process.returncode, "Traceback" in log) == (0, False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"KVKEEP_CONSOLE_ADDRESS": "0.0.0.0:9112"}, "KVKEEP_CONSOLE_ADDRESS"),
        ({"KVKEEP_CONSOLE_ADDRESS": "nowhere"}, "KVKEEP_CONSOLE_ADDRESS: must be host:port"),
        ({"KVKEEP_CACHEMGR_ADMIN_ADDRESS": "10.1.2.3:50062"}, "KVKEEP_TLS_CA_FILE"),
        ({"KVCTL_ROUTER": "10.1.2.3:50054"}, "KVKEEP_TLS_CA_FILE"),
        ({"KVCTL_SERVER": "127.0.0.1:50062,nowhere"}, "--server"),
        ({"KVCTL_SERVER": "unix:/a,unix:/a"}, "twice"),
    ],
)
def test_what_is_wrong_is_one_line(settings: dict[str, str], named: str) -> None:
    with start("kvctl", "console", **settings) as process:
        _, said = process.communicate(timeout=patience(60))
    assert process.returncode == 2
    [line] = said.splitlines()
    assert line.startswith("error: ")
    assert named in line
