"""The set-up of the environment, up to the point where it would install something."""

import sys
from pathlib import Path

import pytest
from progress import Progress
from set_up import Environment, SetUpError, lines_of, needless_cuda, set_up, summary


def environment(folder: Path, *, system_torch: bool = False, this_python: bool = False) -> Environment:
    return Environment(folder, system_torch=system_torch, this_python=this_python)


def pretend(folder: Path, version: str = "3.11.2", system: str = "false") -> Path:
    """What venv leaves, as far as it is looked at."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").touch()
    (folder / "pyvenv.cfg").write_text(f"include-system-site-packages = {system}\nversion = {version}\n")
    return folder


def test_complete_environment_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = environment(pretend(tmp_path / "venv"))
    made.stamp("base").touch()
    made.stamp("dev").touch()
    set_up(made, Progress(), dev=True, model=False)
    made.stamp("model").touch()
    set_up(made, Progress(), dev=True, model=True)
    assert capsys.readouterr().out == ""


def test_environment_fits_only_its_switches(tmp_path: Path) -> None:
    folder = pretend(tmp_path / "venv")
    assert environment(folder).fits()
    assert not environment(folder, system_torch=True).fits()
    assert not environment(folder, this_python=True).fits()
    ours = ".".join(map(str, sys.version_info[:3]))
    assert environment(pretend(tmp_path / "other", ours), this_python=True).fits()


def test_folder_that_is_no_environment_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SetUpError, match="not empty"):
        environment(tmp_path).make(Progress())
    assert (tmp_path / "thesis.txt").exists()


def test_failed_command_says_its_last_line() -> None:
    code = "import sys; print('one'); sys.exit('no space left')"
    with pytest.raises(SetUpError, match="no space left"):
        list(lines_of([sys.executable, "-c", code]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Collecting torch==2.13.0", "looking at torch==2.13.0"),
        ("  Downloading a/numpy-2.whl (16.9 MB)", "downloading numpy-2.whl (16.9 MB)"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("Requirement already satisfied: pip", ""),
        ("", ""),
    ],
)
def test_output_of_pip_is_said_in_short(line: str, said: str) -> None:
    assert summary(line) == said


def test_libraries_for_gpus_are_named_where_no_gpu_is(tmp_path: Path) -> None:
    packages, driver = tmp_path / "lib/python3.11/site-packages", tmp_path / "nvidiactl"
    packages.mkdir(parents=True)
    assert needless_cuda(tmp_path, [driver]) == ""
    (packages / "nvidia/cublas").mkdir(parents=True)
    assert "make setup TORCH_INDEX_URL=" in needless_cuda(tmp_path, [driver])
    driver.touch()
    assert needless_cuda(tmp_path, [driver]) == ""


# What pip would be called with is written down, and nothing is installed.
NOTING = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/called"
"""


@pytest.mark.parametrize("index", ["", "https://torch.example/cpu"])
def test_torch_comes_from_the_index_that_was_named(index: str, tmp_path: Path) -> None:
    folder = pretend(tmp_path / "venv")
    (folder / "bin/python").write_text(NOTING)
    (folder / "bin/python").chmod(0o755)
    set_up(environment(folder), Progress(), dev=False, model=False, torch_index=index)
    calls = (folder / "bin/called").read_text().splitlines()
    assert len(calls) == 1 + bool(index)
    assert (f"--index-url {index} torch" in calls[0]) == bool(index)
    assert "--index-url" not in calls[-1]
