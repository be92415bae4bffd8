"""Runs a benchmark: `python -m bench NAME [ARGUMENT ...]`. Without a name it lists all benchmarks."""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, Path]:
    """Name and file of each benchmark: modules and folders here that can be run."""
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py")]
    found = {(path.stem if path.parent == FOLDER else path.parent.name): path for path in files}
    # A stub executor is a part of benchmarks.
    kept = sorted(found.keys() - {"__main__", "stub_executor"})
    return {name: found[name] for name in kept if "\ndef main(" in found[name].read_text()}


def main() -> None:
    """Runs one benchmark, or lists all of them."""
    _, *arguments = sys.argv
    known = benchmarks()
    name = arguments[0].replace("-", "_") if arguments else ""
    if name in known:
        sys.argv = [f"bench {arguments[0]}", *arguments[1:]]
        runpy.run_module(f"bench.{name}", run_name="__main__")
        return
    print("python -m bench NAME [ARGUMENT ...]; --help after a name shows its arguments\n")
    for one, path in known.items():
        print(f"  {one.replace('_', '-'):<16} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
    sys.exit(2 if name else 0)


if __name__ == "__main__":
    main()
