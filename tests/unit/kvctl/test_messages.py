"""kvctl's messages about impossible requests, in one style; and its help and its version."""

import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvctl.app import main
from protos.rpc.version import program_version
from tests.support.kvctl import VERBS
from tests.support.managers import Managers, cached
from tests.unit.kvctl.conftest import Kvctl

TOKENS = ",".join(map(str, range(11)))


@pytest.fixture
async def kvctl(tmp_path: Path, capfd: pytest.CaptureFixture[str], clean: pytest.MonkeyPatch) -> AsyncIterator[Kvctl]:
    """Of a cache manager with an executor and two cached blocks of four tokens."""
    async with Managers(tmp_path, "").run(executor_id="gpu-0") as client:
        await client.register()
        await cached(client, 9)
        clean.setenv("KVCTL_SERVER", client.settings.cachemgr_admin_address)
        yield Kvctl(capfd, {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("describe", "pool", "nope"), "there is no pool 'nope'"),
        (("describe", "rule", "nope"), "there is no rule 'nope'"),
        (("describe", "hold", "nope"), "there is no hold 'nope'"),
        (("describe", "sequence", "nope"), "there is no sequence 'nope'"),
        (("explain", "--sequence", "nope"), "there is no sequence 'nope'"),
        (("unpin", "nope"), "there is no hold 'nope'"),
        (("rules", "delete", "nope"), "there is no rule 'nope'"),
        (("pool", "set", "nope", "--blocks", 3), "there is no pool 'nope'"),
        (("quota", "delete", "--salt", "acme"), "there is no quota of salt acme"),
    ],
)
async def test_what_is_not_there_is_said_in_one_style(kvctl: Kvctl, line: tuple[str, ...], said: str) -> None:
    done = await kvctl.run(*line)
    assert (done.status, done.out, done.err) == (4, "", f"error: {said}\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("blocks --limit -1", "--limit: must be at least 0"),
        ("pools --timeout -1", "--timeout: must be at least 0.001"),
        ("pools --timeout x", "--timeout: must be a valid number"),
        ("retain --tokens 1 --priority 101", "--priority: must be at most 100"),
        ("pools -o xml", "--output: 'xml' is not one of 'table', 'wide', 'json', 'yaml', 'name'."),
        ("fsck -o name", "--output: name is for lists only"),
        ("rules set x", "--priority: say what the rule does: --priority, --pin-for, --no-store, "
         "--offload-min-priority or --rule-file"),
        ("evict --all", "there is no terminal to ask at: give --yes"),
    ],
)  # fmt: skip
async def test_wrong_usage_is_said_in_one_style(kvctl: Kvctl, line: str, said: str) -> None:
    done = await kvctl.run(*line.split())
    assert (done.status, done.out, done.err) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize("line", ["holds", "leases", "sequences", "rules list", "quota list", "blocks --salt nobody"])
async def test_an_empty_list_is_said_beside_the_output(kvctl: Kvctl, line: str) -> None:
    noun = {"rules list": "rules", "quota list": "quotas"}.get(line, line.split()[0])
    for output in ("table", "name"):
        done = await kvctl.run(*line.split(), "-o", output)
        assert (done.status, done.out, done.err) == (0, "", f"no {noun}\n")
    assert [] in (await kvctl.data(*line.split())).values()


async def test_names_are_printed_a_line_each(kvctl: Kvctl) -> None:
    assert await kvctl.text("pools", "-o", "name") == "gpu-0/0\n"
    keys = [block["key"] for block in (await kvctl.data("blocks"))["blocks"]]
    assert (await kvctl.text("blocks", "-o", "name")).split() == keys


async def test_a_pin_says_which_tokens_it_leaves_out(kvctl: Kvctl) -> None:
    for tokens, said in ((TOKENS, ["left out: the last 3 tokens of the prompt, which fill no block"]), ("0,1,2,3", [])):
        first, *rest = (await kvctl.text("pin", "--tokens", tokens, "--for", "1h", "--dry-run")).splitlines()
        assert first.startswith("would pin ")
        assert rest == said


async def test_a_prompt_without_a_full_block_is_explained(kvctl: Kvctl) -> None:
    assert "the prompt is shorter than a block" in await kvctl.text("explain", "--tokens", "7")


@pytest.fixture
def web() -> Iterator[str]:
    """A server that speaks HTTP/1 only."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_address_for_http_is_recognised(web: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pools", "--server", web]) == 3
    said = f"error: {web} does not speak gRPC: is it an address for HTTP or metrics?\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("name", ["", "rules", *VERBS])
def test_help_has_a_short_name_everywhere(capfd: pytest.CaptureFixture[str], name: str) -> None:
    assert main([*name.split(), "-h"]) == 0
    assert "-h, --help" in capfd.readouterr().out


async def test_versions_are_those_of_kvctl_and_of_each_service(kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await kvctl.text("--version") == f"kvctl {program_version()}\n"
    for name in ("SCHEDULER", "CACHEMGR", "EXECUTOR"):
        monkeypatch.setenv(f"KVKEEP_{name}_ADDRESS", "unix:/nowhere")
    found = (await kvctl.data("version", status=3))["versions"]
    said = {one["name"]: one["version"] for one in found}
    services = dict.fromkeys(("scheduler", "cachemgr", "executor"), "no answer")
    assert said == {"kvctl": program_version(), "admin": program_version()} | services
