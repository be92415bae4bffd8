"""What the router's view of the caches costs: decisions, memory, events, a restart, a large fleet.

Nothing needs a model or a device. Times are process time where they can be, so that a busy machine disturbs them
little. A missed target is a result: nothing fails for it.
"""

import argparse
import importlib
from dataclasses import asdict

from bench import router
from bench.result import Result, add_json_argument
from bench.scale.row import Row
from protos.rpc.startup import collect_rarely

PARTS = ("decision", "size", "events", "restart", "capacity")


def main() -> None:
    """Measures, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the view, of 16 engines")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    add_json_argument(parser)
    arguments = parser.parse_args()
    collect_rarely()
    found: dict[str, list[Row]] = {}
    for name in arguments.only or PARTS:
        found[name] = []
        for row in importlib.import_module(f"{router.__name__}.{name}").rows(arguments.blocks):
            row.show()
            found[name].append(row)
    parts = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    Result("router", {"parts": parts}, {"blocks": arguments.blocks}).write(arguments.json)


if __name__ == "__main__":
    main()
