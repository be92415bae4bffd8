"""The common part of all verbs: services, shards, timeouts, and how answers are shown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import grpc
import typer

from kvctl.display.output import Column, Data, Format, show
from kvctl.remote import Remote
from kvctl.shards import Answers, Shard, ask, owner_of
from kvctl.status import CommandError, Status
from protos.generation.v1 import generation_pb2
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.rpc import addresses
from protos.rpc.addresses import AddressError
from protos.rpc.channel import open_sync_channel
from protos.rpc.settings import ProcessSettings, SettingsError, load

S = TypeVar("S")
T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

# The default addresses of the services.
_FIELDS = ProcessSettings.model_fields
SERVER: str = _FIELDS["cachemgr_admin_address"].default
SCHEDULER: str = _FIELDS["scheduler_address"].default
CACHEMGR: str = _FIELDS["cachemgr_address"].default
EXECUTOR: str = _FIELDS["executor_address"].default

Server = Annotated[
    str,
    typer.Option(
        envvar="KVCTL_SERVER",
        help="Addresses where cache managers serve operators, with commas between them. By default those of the "
        f"router's engines, or without a router KVKEEP_CACHEMGR_ADMIN_ADDRESS, else {SERVER}.",
        show_default=False,
    ),
]
Router = Annotated[
    str,
    typer.Option(envvar=["KVCTL_ROUTER", "KVKEEP_ROUTER_ADDRESS"], help="Where a router serves.", show_default=False),
]
Scheduler = Annotated[
    str,
    typer.Option(
        envvar="KVKEEP_SCHEDULER_ADDRESS",
        help=f"Where the scheduler serves; by default the router's address, or {SCHEDULER} without a router.",
        show_default=False,
    ),
]


def stack_settings() -> ProcessSettings:
    """Addresses and security of calls, from the variables that the services read too. Raises CommandError."""
    try:
        return load(ProcessSettings, os.environ)
    except SettingsError as error:
        raise CommandError(str(error), Status.USAGE) from None


def addresses_of(text: str, option: str) -> list[str]:
    """Addresses with commas between them. Raises typer.BadParameter."""
    found = [address for part in text.split(",") if (address := part.strip())]
    for address in found:
        try:
            addresses.validate(address)
        except ValueError as error:
            raise typer.BadParameter(f"{address} {error}", param_hint=option) from None
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text} names an address twice", param_hint=option)
    return found


class Session:
    """The services as the common options name them. Use it in a with statement."""

    def __init__(self, server: str, router: str, scheduler: str, timeout: float, output: Format) -> None:
        """server: addresses with commas between them, or empty. router and scheduler may be empty, too."""
        self.timeout = timeout
        self.output = output
        settings = stack_settings()
        self.security = settings.security
        self.router_address = router
        # A router knows all shards; the variable of the services names a single shard.
        self._server = server or ("" if router else settings.cachemgr_admin_address)
        self._scheduler = scheduler or router or SCHEDULER
        self._open = contextlib.ExitStack()
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """The cache managers that --server names, else the cache managers of the router's engines.

        Raises typer.BadParameter, CommandError.
        """
        if self._server:
            named = addresses_of(self._server, "--server")
            if not named:
                raise typer.BadParameter("names no address", param_hint="--server")
            return [self._shard(address) for address in named]
        try:
            engines = self.engines.engines
        except CommandError as error:
            if error.status is not Status.UNREACHABLE:
                raise
            message = f"{error} Only the router knows the cache managers: without it name them with --server"
            raise CommandError(message, error.status) from None
        known = {one.cachemgr_admin_address: one.cachemgr_address for one in engines}
        known.pop("", None)
        if not known:
            raise CommandError(
                f"the router at {self.router_address} has not found any engine yet: name cache managers with --server",
                Status.UNREACHABLE,
            )
        return [self._shard(address, data) for address, data in sorted(known.items())]

    @functools.cached_property
    def unknown(self) -> dict[str, CommandError]:
        """Errors by engine, for engines whose shard the router does not know; empty if --server names the shards.

        Raises CommandError.
        """
        if self._server:
            return {}
        return {
            one.address: CommandError(
                f"the router does not know the shard of {one.address}: {one.obstacle}", Status.UNREACHABLE
            )
            for one in self.engines.engines
            if not one.cachemgr_admin_address
        }

    @property
    def shard(self) -> Shard:
        """The only cache manager. Raises typer.BadParameter if there are several, CommandError if none is known."""
        if len(self.shards) > 1:
            listed = ", ".join(shard.address for shard in self.shards)
            raise typer.BadParameter(f"name one of the shards: {listed}", param_hint="--server")
        return self.shards[0]

    def ask(self, call: Callable[[Shard], T], *, executor: str = "", pool: str = "") -> Answers[T]:
        """The answers of all shards, or of the shard with this executor or pool. Raises CommandError if none answers.

        If only some shards fail, their errors are among the answers' failures.
        """
        name = executor or pool.rpartition("/")[0]
        if name and len(self.shards) + len(self.unknown) > 1:
            address = owner_of(name, ask(self.shards, Shard.pools, self.unknown))
            return ask([shard for shard in self.shards if shard.address == address], call)
        return ask(self.shards, call, self.unknown)

    @functools.cached_property
    def engines(self) -> generation_pb2.ListEnginesResponse:
        """The engines of the router, asked once. Raises typer.BadParameter without a router, CommandError."""
        return self.list_engines()

    def list_engines(self) -> generation_pb2.ListEnginesResponse:
        """The engines of the router now. Raises typer.BadParameter without a router, CommandError."""
        if not self.router_address:
            raise typer.BadParameter("name the router", param_hint="--router")
        router = self._remote(self.router_address, generation_rpc.RouterServiceStub)
        return router.call(router.stub.ListEngines, generation_pb2.ListEnginesRequest())

    def forget_engines(self) -> None:
        """Lets the next call look for engines and shards again; for a session that lasts long."""
        for name in ("shards", "unknown", "engines"):
            self.__dict__.pop(name, None)

    @property
    def scheduler(self) -> Remote[generation_rpc.GenerationServiceStub]:
        """The scheduler, or the router in front of several schedulers."""
        return self._remote(self._scheduler, generation_rpc.GenerationServiceStub)

    def operation(self, address: str = "") -> Remote[generation_rpc.SchedulerAdminServiceStub]:
        """A scheduler's service for operators. address: of the scheduler; by default the scheduler of the session."""
        return self._remote(address or self._scheduler, generation_rpc.SchedulerAdminServiceStub)

    def cachemgr(self, address: str) -> Remote[kvcache_rpc.CacheManagerServiceStub]:
        """A cache manager's data plane."""
        return self._remote(address, kvcache_rpc.CacheManagerServiceStub)

    def at(self, address: str) -> grpc.Channel:
        """The channel to an address, which the end of the session closes. Raises CommandError for a bad address."""
        if address not in self._channels:
            try:
                channel = open_sync_channel(address, self.security)
            except AddressError as error:
                raise CommandError(str(error), Status.USAGE) from None
            self._channels[address] = self._open.enter_context(channel)
        return self._channels[address]

    def show(self, data: Data, people: Callable[[bool], str]) -> None:
        """Prints an answer as `--output` says."""
        show(self.output, data, people)

    def show_all(
        self, answers: Answers[T], people: Callable[[bool], str], data: Callable[[Any], Data] = lambda answer: answer
    ) -> None:
        """Prints the answers of shards as `--output` says. Afterwards raises ShardsError if a shard has failed.

        data: makes the data that programs get from an answer, by default the message itself.
        """
        self.show(answers.data(data), people)
        answers.check()

    def show_list(
        self, answers: Answers[Any], columns: Sequence[Column[I]], items: Callable[[Any], Iterable[I]], nouns: str
    ) -> None:
        """Prints a listing as `--output` says. If the listing is empty, a note for people is on standard error.

        Afterwards raises ShardsError if a shard has failed.
        """
        is_empty = not any(True for answer in answers.by_shard.values() for _ in items(answer))
        if is_empty and self.output not in (Format.JSON, Format.YAML):
            typer.echo(f"no {nouns}", err=True)
        elif self.output is Format.NAME:
            self.show(None, lambda _wide: answers.names(columns, items))
        else:
            self.show(answers.data(lambda answer: answer), lambda wide: answers.listing(columns, items, wide=wide))
        answers.check()

    def _shard(self, address: str, data_address: str = "") -> Shard:
        return Shard(
            self._remote(address, kvcache_rpc.CacheAdminServiceStub),
            self._remote(address, kvcache_rpc.CacheEventServiceStub),
            data_address,
        )

    def _remote(self, address: str, stub: Callable[[grpc.Channel], S]) -> Remote[S]:
        return Remote(address, stub(self.at(address)), self.timeout)


def _common(
    output: Annotated[Format, typer.Option("--output", "-o", help="How to show the answer.")] = Format.TABLE,
    server: Server = "",
    router: Router = "",
    scheduler: Scheduler = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for each call.")] = 10.0,
) -> Session:
    """The options that every verb has."""
    return Session(server, router, scheduler, timeout, output)


def verb(
    app: typer.Typer, name: str, example: str, *, lists: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes a session and its own options; adds the common options.

    lists: whether its answer has names for `-o name`.

    A parameter whose type is a dataclass stands for a group of options: the fields of the class replace it.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function, eval_str=True).parameters
        annotations: dict[str, Any] = {name: item.annotation for name, item in parameters.items()}
        groups: dict[str, Any] = {name: group for name, group in annotations.items() if dataclasses.is_dataclass(group)}
        members = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}
        own = [
            option
            for name, item in parameters.items()
            if name != "session"
            for option in (members[name].values() if name in members else (item,))
        ]
        common = inspect.signature(_common, eval_str=True).parameters

        @functools.wraps(function)
        def run(**options: Any) -> None:
            if options["output"] is Format.NAME and not lists:
                raise typer.BadParameter("name is for lists only", param_hint="--output")
            with _common(**{name: options.pop(name) for name in common}) as session:
                for name, group in groups.items():
                    options[name] = group(**{member: options.pop(member) for member in members[name]})
                try:
                    function(session, **options)
                except BrokenPipeError:
                    # The reader has closed the pipe, as with `| head`; the rest of the output is dropped.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    raise typer.Exit(Status.BROKEN_PIPE) from None

        signature = inspect.Signature(
            [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (*own, *common.values())]
        )
        run.__signature__ = signature  # type: ignore[attr-defined]
        app.command(name, epilog=f"Example: {example}")(run)
        return function

    return register


def confirm(question: str, *, yes: bool) -> None:
    """Asks before a verb acts, unless `yes`. Raises CommandError if the answer is no, or without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError("there is no terminal to ask at: give --yes", Status.USAGE)
    if not typer.confirm(question, err=True):
        raise CommandError("not confirmed: nothing was changed", Status.REFUSED)


def ask_confirmed(
    session: Session,
    call: Callable[[Shard, bool], T],
    question: Callable[[T], str],
    *,
    dry_run: bool,
    yes: bool,
    executor: str = "",
    pool: str = "",
) -> Answers[T]:
    """Makes a dry run on the shards and then, unless `dry_run`, the calls after a confirmation; returns the answers.

    call: takes a shard and whether to change nothing. question: makes a question from the answer to a dry run; an empty
    text needs no confirmation. A shard without a match is no failure if another shard has a match. Raises CommandError.
    """
    answers = session.ask(lambda shard: call(shard, True), executor=executor, pool=pool).leave_out_missing()
    if dry_run:
        return answers
    if any(question(answer) for answer in answers.by_shard.values()):
        left_out = [f"{address} is left out: {error}" for address, error in answers.failures.items()]
        confirm("\n".join([answers.lines(question), *left_out]), yes=yes)
    ready = [shard for shard in session.shards if shard.address in answers.by_shard]
    done = ask(ready, lambda shard: call(shard, False), answers.failures, several=answers.several)
    done.without = answers.without
    return done
