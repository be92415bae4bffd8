"""Runs a benchmark: `python -m bench NAME [ARGUMENT ...]`. Without a name it lists all benchmarks."""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, Path]:
    """Name and file of each benchmark: modules here and in `research`, and folders here that can be run."""
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("research/*.py"), *FOLDER.glob("*/__main__.py")]
    found = {(path.parent.name if path.stem == "__main__" else path.stem): path for path in files}
    # Other benchmarks start the stub executor, which is no benchmark itself.
    kept = sorted(found.keys() - {FOLDER.name, "stub_executor"})
    return {name: found[name] for name in kept if "\ndef main(" in found[name].read_text()}


def main() -> None:
    """Runs one benchmark, or lists all of them."""
    _, *arguments = sys.argv
    known = benchmarks()
    name = arguments[0].replace("-", "_") if arguments else ""
    if name in known:
        sys.argv = [f"bench {arguments[0]}", *arguments[1:]]
        path = known[name].parent if known[name].stem == "__main__" else known[name].with_suffix("")
        runpy.run_module(".".join(path.relative_to(FOLDER.parent).parts), run_name="__main__")
        return
    print("python -m bench NAME [ARGUMENT ...]; --help after a name shows its arguments\n")
    for one, path in known.items():
        print(f"  {one.replace('_', '-'):<16} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
    sys.exit(2 if name else 0)


if __name__ == "__main__":
    main()
