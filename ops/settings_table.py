"""The tables of docs/settings.md."""

from pathlib import Path

from pydantic.fields import FieldInfo

from cachemgr.settings import CachemgrSettings
from executor.settings import ExecutorSettings
from kvctl.console.settings import ConsoleSettings
from protos.rpc.settings import ProcessSettings, variable
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings

PROCESSES: tuple[type[ProcessSettings], ...] = (
    SchedulerSettings,
    CachemgrSettings,
    ExecutorSettings,
    ConsoleSettings,
    RouterSettings,
)
_TITLES = ("Scheduler", "Cache manager", "Executor", "Console", "Router")


def default(field: FieldInfo) -> str:
    """A default in the form that people write."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Path):
        return f"`{Path('~', value.relative_to(Path.home()))}`" if value.is_relative_to(Path.home()) else f"`{value}`"
    if field.default_factory is not None:
        return "host name"
    if isinstance(value, bool):
        return f"`{int(value)}`"
    return "empty" if value in (None, "", ()) else f"`{value}`"


def rows(cls: type[ProcessSettings], *, shared: bool) -> list[str]:
    """Table rows of a class: its own fields, or the fields that all processes share."""
    return [
        f"| `{variable(cls, name)}` | {default(field)} | {field.description} |"
        for name, field in cls.model_fields.items()
        if (name in ProcessSettings.model_fields) == shared
    ]


def table() -> str:
    """The tables: first the settings that all processes share, then the settings of each process."""
    sections = {"Every process": rows(SchedulerSettings, shared=True)}
    sections |= {title: rows(cls, shared=False) for title, cls in zip(_TITLES, PROCESSES, strict=True)}
    head = ["| variable | default | meaning |", "| --- | --- | --- |"]
    return "".join("\n".join(["", f"## {title}", "", *head, *lines, ""]) for title, lines in sections.items()) + "\n"
