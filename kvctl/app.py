"""The command line: all verbs, and how errors end it."""

from collections.abc import Sequence

import typer

from kvctl import drain, follow, ghosts, limits, look, quota, rules, steer, top
from kvctl.status import EXIT_STATUSES, CommandError, Status

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=EXIT_STATUSES)
for part in (look, ghosts, steer, drain, follow, top, limits):
    app.add_typer(part.app)
app.add_typer(rules.app, name="rules")
app.add_typer(quota.app, name="quota")

# Whatever is wrong with a command line; typer names only some of it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@app.callback(invoke_without_command=True)
def kvctl(ctx: typer.Context) -> None:
    """See and steer the cache of a running kvkeep stack.

    Every verb says more about itself: kvctl VERB --help. Where the services are is read from KVCTL_SERVER or from the
    stack's own variables, KVKEEP_CACHEMGR_ADMIN_ADDRESS and so on.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; its exit status. Errors are one line on standard error."""
    try:
        status = app(arguments, prog_name="kvctl", standalone_mode=False)
    except CommandError as error:
        return _fail(str(error), error.status)
    except _UsageError as error:
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        return _fail(" ".join(said.split()), Status.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return Status.INTERRUPTED
    return int(status or Status.OK)


def _fail(message: str, status: Status) -> int:
    typer.echo(f"error: {message}", err=True)
    return status
