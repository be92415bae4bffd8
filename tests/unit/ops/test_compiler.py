"""The stack's screen says if a compiler is missing for speed."""

import shutil

import pytest
from run_stack import compiler_problem

from kernels.cpu_decoder.build import COMPILERS


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_missing_compiler_is_reported_in_one_line_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said = compiler_problem(device)
    assert "no C++ compiler" in said
    assert "install g++" in said
    assert "\n" not in said
    assert compiler_problem("cuda:0") == ""


def test_nothing_is_said_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", {COMPILERS[-1]: "/somewhere/compiler"}.get)
    assert compiler_problem("cpu") == ""
