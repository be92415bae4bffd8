"""The table of docs/settings.md: `python ops/settings_table.py` checks it, with --write it is brought up to date."""

import argparse
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from cachemgr.settings import CachemgrSettings
from executor.settings import ExecutorSettings
from kvctl.console.settings import ConsoleSettings
from protos.rpc.settings import ProcessSettings, variable
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings

PAGE = Path(__file__).resolve().parents[1] / "docs/settings.md"
BEGIN, END = "<!-- settings: written by make fix -->\n", "<!-- end of settings -->\n"
PROCESSES: tuple[type[ProcessSettings], ...] = (
    SchedulerSettings,
    CachemgrSettings,
    ExecutorSettings,
    ConsoleSettings,
    RouterSettings,
)


def default(field: FieldInfo) -> str:
    """A default as people write it."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Path):
        return f"`{Path('~', value.relative_to(Path.home()))}`" if value.is_relative_to(Path.home()) else f"`{value}`"
    if field.default_factory is not None:
        return "host name"
    if isinstance(value, bool):
        return f"`{int(value)}`"
    return "empty" if value in (None, "", ()) else f"`{value}`"


def rows(cls: type[ProcessSettings], *, shared: bool) -> list[str]:
    """Table rows of a class: its own fields, or those that all processes share."""
    return [
        f"| `{variable(cls, name)}` | {default(field)} | {field.description} |"
        for name, field in cls.model_fields.items()
        if (name in ProcessSettings.model_fields) == shared
    ]


def table() -> str:
    """The whole table."""
    lines = ["| variable | default | meaning |", "| --- | --- | --- |", *rows(SchedulerSettings, shared=True)]
    for cls in PROCESSES:
        lines += rows(cls, shared=False)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Checks the table of the page of settings.")
    parser.add_argument("--write", action="store_true", help="bring it up to date")
    asked = parser.parse_args()
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + table() + END + after
    if wanted == text:
        return 0
    if asked.write:
        PAGE.write_text(wanted)
        return 0
    print("the table of docs/settings.md is not that of the settings classes: make fix", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
