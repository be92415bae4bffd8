"""The command line: all verbs, and how errors end it."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
import typer.core

from kvctl.console import command as console
from kvctl.status import EXIT_STATUSES, CommandError, Status
from kvctl.verbs import adapters, change, engines, follow, ghosts, pool, quota, rules, show, top, weights
from protos.rpc.version import program_version

# The base of all usage errors, which typer does not export.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class Verbs(typer.core.TyperGroup):
    """Suggests a verb close to a mistyped verb, but no verb that asks before it acts: users follow suggestions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"suggest_commands": False})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that a line begins with. Raises a usage error."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as refused:
            error: Any = refused
            harmless = [
                name for name, verb in self.commands.items() if not any("--yes" in param.opts for param in verb.params)
            ]
            if args and (close := difflib.get_close_matches(args[0], harmless, n=1)):
                error.message += f" Did you mean '{close[0]}'?"
            raise


app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EXIT_STATUSES,
    # These options hold for verbs, too.
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (show, engines, ghosts, change, follow, top):
    app.add_typer(part.app)
app.add_typer(console.app)
app.add_typer(rules.app, name="rules", cls=Verbs)
app.add_typer(quota.app, name="quota", cls=Verbs)
app.add_typer(pool.app, name="pool", cls=Verbs)
app.add_typer(adapters.app, name="adapters", cls=Verbs)
app.add_typer(weights.app, name="weights", cls=Verbs)


@app.callback(invoke_without_command=True)
def kvctl(
    ctx: typer.Context,
    own_version: Annotated[bool, typer.Option("--version", help="Show the version of kvctl.")] = False,
) -> None:
    """See and steer the cache of a running kvkeep stack.

    Every verb says more about itself: kvctl VERB --help. The addresses of the services come from KVCTL_SERVER or from
    the stack's own variables, KVKEEP_CACHEMGR_ADMIN_ADDRESS and so on. Several cache managers are named with commas
    between them, or learned from a router: KVCTL_ROUTER. Then a verb asks all cache managers, unless --server, a
    pool or an executor selects a single cache manager.
    """
    if own_version:
        typer.echo(f"kvctl {program_version()}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status. Errors are one line on standard error."""
    try:
        status = app(arguments, prog_name="kvctl", standalone_mode=False)
    except CommandError as error:
        return _fail(str(error), error.status)
    except _UsageError as error:
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        return _fail(_plain(" ".join(said.split())), Status.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return Status.INTERRUPTED
    return int(status or Status.OK)


def verbs() -> dict[str, Any]:
    """Every verb by its name, with the name of its group before it: "rules list"."""

    def of(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                yield from of(one, f"{path}{name} ")
            else:
                yield f"{path}{name}", one

    return dict(of(typer.main.get_command(app)))


# Messages of typer and pydantic, and the words that a person at the command line expects.
_WORDS = (
    (re.compile(r"^Invalid value for '?([^':]+)'?(?: / '[^']+')*: (?:Value error, )?"), r"\1: "),
    (re.compile(r"Input should be greater than or equal to"), "must be at least"),
    (re.compile(r"Input should be less than or equal to"), "must be at most"),
    (re.compile(r"Input should be a valid (\w+), .*"), r"must be a valid \1"),
)


def _plain(message: str) -> str:
    """A usage error in the style of all other errors."""
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    return message


def _fail(message: str, status: Status) -> int:
    typer.echo(f"error: {message}", err=True)
    return status
