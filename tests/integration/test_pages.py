"""Links of the pages are right, and names in them exist. The answers of their examples are tested with a stack."""

import re
import subprocess
import sys
from pathlib import Path

import layout
import pytest
import reference
import run_stack
import yaml

from bench.__main__ import benchmarks
from cachemgr.rpc import tenancy
from executor.models.llama import FAMILIES
from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2
from protos.rpc.roles import roles_of
from protos.vllm import engine_pb2
from scheduler.settings import SchedulerSettings
from tests.capture import COMMANDS, README, shown
from tests.stack import ROOT
from tests.support.kvctl import VERBS
from tests.support.names import unknown_metrics, unknown_settings
from tests.support.pages import DOCS, PAGES, WITH_EXAMPLES, examples
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, CONFIGS

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(r"(\$ )?(\.venv/bin/)?(grpcurl|kvctl|curl) ")
METHODS = [
    f"{service.full_name}/{method.name}"
    for file in (execution_pb2, generation_pb2, kvcache_pb2, engine_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Anchors of headings as GitHub and mkdocs make them, if both make the same."""
    titles = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", title).lower() for title in HEADING.findall(prose(page))]
    github = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}
    return github & {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in titles}


def of_pages(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@of_pages(PAGES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
        # The folder can be a site by itself.
        if page.is_relative_to(DOCS):
            assert target.is_relative_to(DOCS), link


def test_the_site_has_every_page_once() -> None:
    def files(entries: list[dict[str, object]]) -> list[object]:
        values = [value for entry in entries for value in entry.values()]
        return [file for value in values for file in (files(value) if isinstance(value, list) else [value])]

    pages = [str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)]
    assert sorted(map(str, files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))) == sorted(pages)
    index = set(LINK.findall((DOCS / "index.md").read_text()))
    assert {page for page in pages if "/" not in page} == index | {"index.md"}


def test_generated_pages_are_those_of_the_code() -> None:
    stale = [path.name for path, text in reference.wanted().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "make reference"


def test_the_table_of_families_is_that_of_the_tests() -> None:
    """What tests of exactness and of refusals say in each run, the kept result of all families says, too."""
    parts = re.split(r"^### ", (DOCS / "models.md").read_text(), flags=re.MULTILINE)
    said = {title: set(re.findall(r"`(\w+)`", text)) for title, _, text in (part.partition("\n") for part in parts)}
    assert said["Exact and fast"] == set(FAMILIES)
    usual = {configuration().model_type for configuration in (CONFIGS | COMPILED_CONFIGS).values()}
    assert usual <= said["Exact and fast"] | {name.removesuffix("_text") for name in said["Exact"]} | said["Exact"]
    assert {"bert", "roberta", "falcon", "gptj", "gpt_neo", "mpt"} <= said["Refused"]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=.?https?:")
    assert [page.name for page in (tmp_path / "site").rglob("*.html") if loaded.search(page.read_text())] == []


@of_pages(PAGES)
def test_settings_metrics_verbs_and_targets_are_ours(page: Path) -> None:
    text = page.read_text()
    # A setting of all processes may be another for one of them.
    assert not unknown_settings(text)
    assert {name for name in unknown_metrics(text) if not name.endswith("_")} == set()
    groups = {name.partition(" ")[0] for name in VERBS}
    for verb in re.findall(r"(?:^|[`(] ?)kvctl ([a-z]+)", text, re.MULTILINE):
        assert verb in groups, verb
    makefile = (ROOT / "Makefile").read_text()
    measured = {f"bench-{name.replace('_', '-')}" for name in benchmarks()}
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in measured or f"\n{target}: " in makefile, target


@of_pages(PAGES)
def test_every_command_is_in_an_example(page: Path) -> None:
    run = [line for example in examples(page) for line in example.code.splitlines()] if page in WITH_EXAMPLES else []
    text = page.read_text()
    if page == README:
        text = text.replace(shown(text), "")
    code = [line for line in text.splitlines() if COMMAND.match(line.removeprefix("    "))]
    assert [line for line in code if line not in run] == []


def test_the_session_of_the_readme_is_what_make_capture_writes() -> None:
    lines = [line.removeprefix("$ ") for line in shown(README.read_text()).splitlines() if line.startswith("$ ")]
    assert tuple(lines) == COMMANDS


def test_the_page_about_grpc_names_every_way_to_steer() -> None:
    steps = list(examples(DOCS / "grpc.md"))
    called = {name for step in steps for name in re.findall(r"Cache(?:Admin|Event)Service/(\w+)", step.code)}
    assert called >= {
        "CreateRetentionRule",
        "PinPrefix",
        "ExplainPrefix",
        "PurgeBlocks",
        "WatchEvents",
        "SetQuota",
        "ForgetBlocks",
    }
    assert all(step.shown for step in steps if "/Delete" not in step.code)


def test_every_verb_is_shown_with_its_answer() -> None:
    lines = [line for one in examples(DOCS / "operations.md") for line in one.code.splitlines()]
    assert [verb for verb in VERBS if not any(line.startswith(f"kvctl {verb}") for line in lines)] == []


def test_the_table_of_roles_is_that_of_the_code() -> None:
    text = (DOCS / "security.md").read_text()
    rows = re.findall(r"^\| `([\w.]+\.[A-Z]\w+)`[^|]*\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    for method in METHODS:
        service, _, name = method.partition("/")
        told = next(
            who
            for of, names, who in rows
            if of == service
            and (names.startswith("all") or any(fits(name, one) for one in re.findall(r"`(\w+…?)`", names)))
        )
        assert set(told.split(", ")) == {role.value for role in roles_of(method)}, method
    assert {of for of, _, _ in rows} == {method.partition("/")[0] for method in METHODS}


def fits(name: str, pattern: str) -> bool:
    """Whether a method is the one named, or begins as said in front of …"""
    return name.startswith(pattern[:-1]) if pattern.endswith("…") else name == pattern


def test_methods_of_a_tenants_operators_are_documented() -> None:
    text = (DOCS / "security.md").read_text()
    told = re.findall(r"`(\w+)`", text.partition("They may call")[2].partition("All other methods")[0])
    assert set(told) == set(tenancy._CHECKS)


def test_readme_and_run_stack_ask_by_one_command() -> None:
    address = str(SchedulerSettings.model_fields["scheduler_address"].default)
    ask = run_stack.generate_command(Path(".venv/bin"), address)
    assert ask in (ROOT / "README.md").read_text()
    # Addresses, and commands for a different environment, are complete, too.
    assert run_stack.generate_command(Path(".venv/bin"), "unix:/s") == f'{ask} ARGS="--address unix:/s"'
    assert run_stack.generate_command(Path("/env/bin"), "unix:/s").startswith(
        "/env/bin/python -m scheduler.generate --"
    )


def test_the_quick_start_shows_the_output_of_run_stack() -> None:
    folder = "/home/you/.local/state/kvkeep"
    environ = run_stack.DEFAULTS | {"KVKEEP_STATE_DIR": folder, "KVKEEP_REDIS_URL": f"unix://{folder}/redis/socket"}
    printed = run_stack.directions(layout.single(environ) + layout.console(environ))
    lines = "".join(f"    {line}\n" for line in printed.partition("\n\n")[0].splitlines())
    assert f" s\n\n{lines}\n" in (DOCS / "quickstart.md").read_text()
