"""How kvctl behaves, whatever the verb: statuses, errors in a line, questions, pipes, help and completion."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from tests.stack import Stack
from tests.support.kvctl import VERBS, Kvctl, ask, command, environment

PROMPT = ("--tokens", "1,2,3")
# A line for every verb that calls a service.
LINES: dict[str, tuple[str, ...]] = {
    "ping": (),
    "version": (),
    "pools": (),
    "sequences": (),
    "prefixes": (),
    "blocks": (),
    "leases": (),
    "holds": (),
    "explain": PROMPT,
    "preview": PROMPT,
    "describe": (),
    "ghosts": (),
    "state": (),
    "fsck": (),
    "engines": ("--router", "unix:/nowhere"),
    "pin": (*PROMPT, "--for", "1h"),
    "unpin": ("pin-1", "--yes"),
    "retain": (*PROMPT, "--priority", "80"),
    "evict": ("--all", "--yes"),
    "forget": ("--salt", "x", "--yes"),
    "drain": ("--yes",),
    "abort": ("--all", "--yes"),
    "cancel": ("chatcmpl-1", "--yes"),
    "watch": (),
    "top": ("--once",),
    "rules list": (),
    "rules set": ("acme", "--no-store", "--yes"),
    "rules delete": ("acme", "--yes"),
    "quota list": (),
    "quota set": ("--salt", "x"),
    "quota delete": ("--salt", "x", "--yes"),
    "pool set": ("executor-0/0", "--blocks", "1", "--yes"),
    "adapters list": (),
    "adapters load": ("sql", "folder"),
    "adapters unload": ("sql", "--yes"),
    "weights update": ("v1", "folder", "--yes"),
    "weights reset": ("--yes",),
}
DESTRUCTIVE = (
    *("unpin", "evict", "forget", "drain", "abort", "cancel", "rules set", "rules delete", "quota delete"),
    "adapters unload",
)
NOWHERE = ("KVCTL_SERVER", "KVKEEP_SCHEDULER_ADDRESS", "KVKEEP_CACHEMGR_ADDRESS", "KVKEEP_EXECUTOR_ADDRESS")

pytestmark = pytest.mark.model


@pytest.fixture
def kvctl(stack: Stack, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvctl:
    return Kvctl(stack, capfd, monkeypatch)


def test_no_verb_is_left_out() -> None:
    assert set(LINES) == set(VERBS) - {"console", "replay"}


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_helps_with_an_example_of_itself(kvctl: Kvctl, name: str) -> None:
    said = kvctl.text(*name.split(), "--help")
    assert f"Example: kvctl {name}" in " ".join(said.split())


@pytest.mark.parametrize("name", LINES)
def test_every_verb_that_calls_a_service_takes_the_common_options(name: str) -> None:
    helps = {option: param.help for param in VERBS[name].params for option in param.opts}
    assert {"--output", "-o", "--server", "--router", "--scheduler", "--timeout"} <= set(helps)
    assert helps["--timeout"] == "Seconds to wait for each call."


@pytest.mark.parametrize("name", LINES)
def test_a_server_that_is_not_there_is_said_in_a_line(kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in NOWHERE:
        monkeypatch.setenv(variable, "unix:/nowhere")
    done = kvctl.run(*name.split(), *LINES[name])
    assert done.status == 3, done
    if name in ("ping", "version"):
        assert done.out.count("no answer") == 4
    else:
        assert done.out == ""
        assert done.err.startswith("error: no answer at unix:/nowhere")
        assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "status", "named"),
    [
        (("pools", "--page"), 2, "--page"),
        (("abort",), 2, "--all"),
        (("abort", "x", "--all"), 2, "--all"),
        (("abort", "x", "--yes"), 4, "no live request has this id"),
        (("cancel",), 2, "request_id"),
        (("cancel", "x", "--yes"), 4, "no live request has this id"),
        (("pools", "-o", "xml"), 2, "xml"),
        (("nothing",), 2, "nothing"),
        (("pools", "--timeout", "0"), 2, "--timeout"),
        (("explain", "--tokens", "1,x"), 2, "--tokens"),
        (("explain", "--tokens", "1", "--text", "x"), 2, "--text"),
        (("explain",), 2, "--tokens"),
        (("explain", "--file", "/nowhere"), 2, "--file"),
        (("explain", "--text", ""), 2, "text"),
        (("explain", *PROMPT, "--group", "9"), 2, "group"),
        (("explain", "--sequence", "nobody"), 4, "nobody"),
        (("blocks", "--tier", "tape"), 2, "--tier"),
        (("blocks", "--pool", "nowhere/0"), 4, "nowhere/0"),
        (("pin", *PROMPT, "--for", "5"), 2, "--for"),
        (("pin", *PROMPT, "--for", "0s"), 2, "duration"),
        (("pin", "--for", "5s"), 2, "--tokens"),
        (("unpin", "pin-x", "--yes"), 4, "pin-x"),
        (("evict", "--yes"), 2, "--all"),
        (("evict", "--all", "--salt", "x", "--yes"), 2, "--all"),
        (("forget", "--yes"), 2, "--salt"),
        (("forget", "--session", "x", "--salt", "x"), 2, "--salt"),
        (("rules", "set", "a b", "--no-store"), 2, "rule.name"),
        (("rules", "set", "x", "-f", "/dev/null"), 2, "--rule-file"),
        (("rules", "delete", "nobody", "--yes"), 4, "nobody"),
        (("quota", "set", "--salt", "x", "--tenant", "y"), 2, "--tenant"),
        (("quota", "delete", "--salt", "x", "--yes"), 4, "salt x"),
        (("pool", "set", "nowhere/0", "--blocks", "9"), 4, "nowhere/0"),
        (("pool", "set", "executor-0/0"), 2, "--blocks"),
        (("describe", "thing", "x"), 2, "thing"),
        (("ghosts", "--executor", "nobody"), 4, "nobody"),
        (("ghosts", "--window", "2h"), 2, "window"),
        (("describe", "pool"), 2, "NAME"),
        (("watch", "--after", "99999999"), 4, "after_event_number"),
        (("replay", "/nowhere"), 2, "/nowhere"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_that_names_it(
    kvctl: Kvctl, line: tuple[str, ...], status: int, named: str
) -> None:
    done = kvctl.run(*line)
    assert (done.status, done.out) == (status, ""), done
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert named in done.err


@pytest.mark.parametrize("name", DESTRUCTIVE)
def test_what_destroys_wants_a_yes(kvctl: Kvctl, name: str) -> None:
    options = {option for param in VERBS[name].params for option in param.opts}
    assert {"--dry-run", "--yes"} <= options
    done = kvctl.run(*name.split(), *(word for word in LINES[name] if word != "--yes"))
    # There is no question about a request, a pin, a rule, a quota or an adapter that is not there.
    is_there = name not in ("cancel", "unpin", "rules delete", "quota delete", "adapters unload")
    assert done.status == (2 if is_there else 4), done
    assert is_there == ("there is no terminal to ask at: give --yes" in done.err)


@pytest.mark.parametrize(("answer", "status", "left"), [("n", 4, 1), ("y", 0, 0)])
def test_a_terminal_is_asked(stack: Stack, kvctl: Kvctl, answer: str, status: int, left: int) -> None:
    assert kvctl.run("rules", "set", "asked", "--no-store", "--yes").status == 0
    done = ask(environment(stack), answer, "rules", "delete", "asked")
    assert done.status == status
    assert "Delete rule asked and end 0 leases?" in done.err
    assert ("deleted" in done.out) == (status == 0)
    assert ("not confirmed: nothing was changed" in done.err) == (status == 4)
    assert len(kvctl.data("rules", "list")["rules"]) == left
    if left:
        assert kvctl.run("rules", "delete", "asked", "--yes").status == 0


def test_a_rule_for_all_and_a_rule_that_replaces_another_are_asked_about(stack: Stack, kvctl: Kvctl) -> None:
    with contextlib.ExitStack() as undo:
        undo.callback(kvctl.run, "rules", "delete", "asked", "--yes")
        for line in (("--no-store",), ("--start", "16", "--priority", "80")):
            done = ask(environment(stack), "n", "rules", "set", "asked", *line)
            assert done.status == 4
            assert "Make rule asked, which matches all requests: order 0, " in done.err
        assert kvctl.data("rules", "list")["rules"] == []
        assert kvctl.run("rules", "set", "asked", "--salt", "a", "--priority", "80").status == 0
        for answer, status, match in (("n", 4, {"salt": "a"}), ("y", 0, {"salt": "b"})):
            done = ask(environment(stack), answer, "rules", "set", "asked", "--salt", "b", "--priority", "70")
            assert done.status == status
            question = "Change rule asked from order 0, salt a: priority 80 to order 0, salt b: priority 70?"
            assert question in " ".join(done.err.split())
            assert kvctl.data("rules", "list")["rules"][0]["match"].items() >= match.items()


def test_a_reader_that_disconnects_is_no_error(stack: Stack) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command("pools"), stdout=writer, stderr=subprocess.PIPE, env=environment(stack), check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_shell_completes_verbs_and_options(stack: Stack) -> None:
    def complete(words: str) -> set[str]:
        shell = environment(stack) | {
            "_KVCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
        }  # fmt: skip
        done = subprocess.run(command(), capture_output=True, text=True, env=shell, check=False)
        return set(done.stdout.split())

    assert complete("kvctl qu") == {"quota"}
    assert {"list", "set", "delete"} == complete("kvctl rules ")
    assert {"table", "wide", "json", "yaml", "name"} <= complete("kvctl pools --output ")


def test_the_statuses_are_listed_by_the_help(kvctl: Kvctl) -> None:
    for line in ((), ("--help",)):
        said = " ".join(kvctl.text(*line).split())
        for status in ("0 done", "1 something wrong", "2 wrong usage", "3 a service cannot", "4 refused", "130 interr"):
            assert status in said
