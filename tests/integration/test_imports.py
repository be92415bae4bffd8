"""Each package imports only the packages below it."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.stack import ROOT
from tests.support.patience import patience

PACKAGES = ("protos", "cachemgr", "scheduler", "executor", "kernels", "kvctl")
MAY_IMPORT = {
    "protos": {"protos"},
    "kernels": {"kernels"},
    "cachemgr": {"cachemgr", "protos"},
    "scheduler": {"scheduler", "protos"},
    "executor": {"executor", "kernels", "protos"},
    "kvctl": {"kvctl", "protos"},
}
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def sources(folder: str) -> list[Path]:
    """Python files written by hand."""
    return [path for path in sorted(ROOT.joinpath(folder).rglob("*.py")) if not path.name.endswith(GENERATED)]


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_packages_below_it(package: str) -> None:
    ours = set(PACKAGES) | {"bench", "tests", "ops"}
    for path in sources(package):
        assert imported(path) & ours <= MAY_IMPORT[package], path


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("cachemgr", ("torch", "transformers", "triton", "numpy")),
        ("scheduler", ("torch", "transformers", "triton")),
        ("kvctl", ("torch", "transformers", "triton", "numpy", "tokenizers", "redis", "uvloop")),
    ],
)
def test_package_runs_without_heavy_packages(package: str, heavy: tuple[str, ...]) -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(package) if path.stem != "__main__"
    ]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
print(*sorted(set({heavy}) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert done.stdout.strip() == ""


def test_distribution_holds_exactly_the_six_packages() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = config["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {name.partition(".")[0] for name in find_packages(str(ROOT), include=include)}
    assert found == set(PACKAGES)
    assert set(config["tool"]["mypy"]["packages"]) == set(PACKAGES)
