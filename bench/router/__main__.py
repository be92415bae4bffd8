"""Costs of the router's view of the caches: decisions, memory, events, a restart, a large fleet.

Nothing needs a model or a device. Times are process time if possible, so that a busy machine disturbs them little. A
missed target is reported, but does not fail the run.
"""

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import asdict

from bench import router
from bench.result import Result, add_json_argument
from bench.router.capacity import Size
from bench.scale.row import Row
from protos.rpc.startup import collect_rarely

CAPACITY = "capacity"
PARTS = ("decision", "size", "events", "restart", CAPACITY)
BLOCKS, LARGE_FLEET = 1_000_000, Size(blocks=10_000_000, engines=256, shards=16, events=5_000)


def rows_of(part: str, given: argparse.Namespace) -> Iterator[Row]:
    """The rows of a part."""
    module = importlib.import_module(f"{router.__name__}.{part}")
    if part == CAPACITY:
        size = Size(given.blocks or LARGE_FLEET.blocks, given.engines, given.shards, given.events)
        yield from module.rows(size)
    else:
        yield from module.rows(given.blocks or BLOCKS)


def main() -> None:
    """Measures, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    blocks = f"blocks of the view ({BLOCKS:,} of 16 engines, {LARGE_FLEET.blocks:,} of the large fleet)"
    parser.add_argument("--blocks", type=int, help=blocks)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--engines", type=int, default=LARGE_FLEET.engines, help="of the large fleet")
    parser.add_argument("--shards", type=int, default=LARGE_FLEET.shards, help="of the large fleet")
    parser.add_argument("--events", type=int, default=LARGE_FLEET.events, help="of each of its shards in a second")
    add_json_argument(parser)
    arguments = parser.parse_args()
    if not 1 <= arguments.shards <= arguments.engines:
        parser.error("--shards must be at least 1 and at most --engines: each shard needs an engine")
    collect_rarely()
    found: dict[str, list[Row]] = {}
    for name in arguments.only or PARTS:
        found[name] = []
        for row in rows_of(name, arguments):
            row.show()
            found[name].append(row)
    asked = {name: value for name, value in vars(arguments).items() if name != "json"}
    parts = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    Result("router", {"parts": parts}, asked).write(arguments.json)


if __name__ == "__main__":
    main()
