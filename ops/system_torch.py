"""Checks that the machine's torch, triton and transformers are in the range of pyproject.toml's extra `executor`.

Runs in an environment that sees the machine's packages.
"""

import argparse
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def fault(needed: Requirement) -> str:
    """What is wrong with a required package; empty when nothing is."""
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return f"{needed.name} is not installed for this Python ({needed.name}{needed.specifier} is needed)"
    print(f"using the machine's {needed.name} {found}")
    if needed.specifier.contains(found, prereleases=True):
        return ""
    return f"{needed.name} {found} is not in the supported range {needed.specifier}"


def main() -> int:
    """Returns the exit status."""
    argparse.ArgumentParser(
        description="Checks that the machine's torch, triton and transformers are in the range of pyproject.toml."
    ).parse_args()
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    requirements = [Requirement(line) for line in extras["executor"]]
    wanted = [needed for needed in requirements if not needed.marker or needed.marker.evaluate()]
    faults = [text for needed in wanted if not needed.extras and (text := fault(needed))]
    print("; ".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
