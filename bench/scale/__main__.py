"""Stalls and costs of the cache manager with a million blocks and up to 100,000 rules.

Run it with `make bench-scale`. Every module of this package with a function `rows(blocks)` adds its rows. Stalls and
costs are process time, so that a busy machine disturbs them little. Missed targets do not fail the run.
"""

import argparse
import importlib
import pkgutil
from dataclasses import asdict

from bench import scale
from bench.result import Result, add_json_argument
from bench.scale.row import Row
from protos.rpc.startup import collect_rarely


def main() -> None:
    """Measures, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [module.name for module in pkgutil.iter_modules(scale.__path__) if module.name not in ("row", "__main__")]
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the cache")
    parser.add_argument("--only", choices=names, action="append", help="a part; may be repeated")
    add_json_argument(parser)
    arguments = parser.parse_args()
    collect_rarely()
    found: dict[str, list[Row]] = {}
    for name in arguments.only or names:
        found[name] = []
        for row in importlib.import_module(f"{scale.__name__}.{name}").rows(arguments.blocks):
            row.show()
            found[name].append(row)
    parts = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    Result("scale", {"parts": parts}, {"blocks": arguments.blocks}).write(arguments.json)


if __name__ == "__main__":
    main()
