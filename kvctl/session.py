"""The common part of all verbs: services, timeouts, and how answers are shown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar

import grpc
import typer

from kvctl.display.output import Data, Format, show
from kvctl.status import CommandError, Status, command_error
from protos.generation.v1 import generation_pb2_grpc as generation_rpc
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.rpc.addresses import AddressError
from protos.rpc.channel import open_sync_channel
from protos.rpc.errors import from_rpc_error
from protos.rpc.security import Security
from protos.rpc.settings import ProcessSettings, SettingsError, load

S = TypeVar("S")
R = TypeVar("R")

PAGE = 1000
# Where services listen by default.
_FIELDS = ProcessSettings.model_fields
SERVER: str = _FIELDS["cachemgr_admin_address"].default
SCHEDULER: str = _FIELDS["scheduler_address"].default
CACHEMGR: str = _FIELDS["cachemgr_address"].default
EXECUTOR: str = _FIELDS["executor_address"].default

Server = Annotated[
    str,
    typer.Option(
        envvar=["KVCTL_SERVER", "KVKEEP_CACHEMGR_ADMIN_ADDRESS"], help="Where the cache manager serves operators."
    ),
]
Scheduler = Annotated[str, typer.Option(envvar="KVKEEP_SCHEDULER_ADDRESS", help="Where the scheduler serves.")]


class Remote(Generic[S]):
    """A service at an address."""

    def __init__(self, address: str, stub: S, timeout: float) -> None:
        self.address = address
        self.stub = stub
        self._timeout = timeout

    def call(self, method: Callable[..., R], request: Any) -> R:
        """Calls a method of the stub. Raises CommandError."""
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise command_error(from_rpc_error(error), self.address) from None

    def messages(self, method: Callable[..., Any], request: Any, seconds: float | None, *, ends: bool) -> Iterator[Any]:
        """Messages of a stream within so many seconds. Raises CommandError. ends: the end of the time is no error."""
        call, begun = method(request, timeout=seconds), False
        try:
            for message in call:
                begun = True
                yield message
        except grpc.RpcError as caught:
            error = from_rpc_error(caught)
            if ends and error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            if begun and error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
                raise CommandError(f"the connection to {self.address} broke", Status.UNREACHABLE) from None
            raise command_error(error, self.address) from None
        finally:
            call.cancel()

    def all_pages(self, method: Callable[..., R], request: Any, items: str, limit: int = 0) -> R:
        """The pages of a listing as one answer. items: its field; limit: how many of them at most, 0 for all."""
        whole: Any = None
        while True:
            left = limit - len(getattr(whole, items)) if limit and whole is not None else limit
            request.page_size = min(left, PAGE) or PAGE
            page: Any = self.call(method, request)
            if whole is None:
                whole = page
            else:
                whole.ClearField("next_page_token")
                whole.MergeFrom(page)
            if limit:
                # A page of leases ends with all of its last block.
                del getattr(whole, items)[limit:]
            if not page.next_page_token or (limit and len(getattr(whole, items)) >= limit):
                answer: R = whole
                return answer
            request.page_token = page.next_page_token


def security() -> Security:
    """How to call, from the variables that the services read too. Raises CommandError."""
    try:
        return load(ProcessSettings, os.environ).security
    except SettingsError as error:
        raise CommandError(str(error), Status.USAGE) from None


class Session:
    """The services as the common options name them. Use it in a with statement."""

    def __init__(self, server: str, scheduler: str, timeout: float, output: Format) -> None:
        self.timeout = timeout
        self.output = output
        self.security = security()
        self._server = server
        self._scheduler = scheduler
        self._open = contextlib.ExitStack()
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def admin(self) -> Remote[kvcache_rpc.CacheAdminServiceStub]:
        """The cache manager's service for operators."""
        return self._remote(self._server, kvcache_rpc.CacheAdminServiceStub)

    @property
    def events(self) -> Remote[kvcache_rpc.CacheEventServiceStub]:
        """Its events."""
        return self._remote(self._server, kvcache_rpc.CacheEventServiceStub)

    @property
    def scheduler(self) -> Remote[generation_rpc.GenerationServiceStub]:
        """The scheduler."""
        return self._remote(self._scheduler, generation_rpc.GenerationServiceStub)

    @property
    def operation(self) -> Remote[generation_rpc.SchedulerAdminServiceStub]:
        """The scheduler's service for operators."""
        return self._remote(self._scheduler, generation_rpc.SchedulerAdminServiceStub)

    def cachemgr(self, address: str) -> Remote[kvcache_rpc.CacheManagerServiceStub]:
        """The cache manager's data plane."""
        return self._remote(address, kvcache_rpc.CacheManagerServiceStub)

    def pools(self) -> list[pb.Pool]:
        """All pools with their counters. Raises CommandError."""
        admin = self.admin
        return list(admin.all_pages(admin.stub.ListPools, pb.ListPoolsRequest(), "pools").pools)

    def quotas(self) -> pb.ListQuotasResponse:
        """All quotas with the blocks of their accounts. Raises CommandError."""
        admin = self.admin
        return admin.all_pages(admin.stub.ListQuotas, pb.ListQuotasRequest(), "quotas")

    def at(self, address: str) -> grpc.Channel:
        """The channel to an address; the end of the session closes it."""
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

    def _remote(self, address: str, stub: Callable[[grpc.Channel], S]) -> Remote[S]:
        return Remote(address, stub(self.at(address)), self.timeout)


def _common(
    output: Annotated[Format, typer.Option("--output", "-o", help="How to show the answer.")] = Format.TABLE,
    server: Server = SERVER,
    scheduler: Scheduler = SCHEDULER,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for each call.")] = 10.0,
) -> Session:
    """The options that every verb has."""
    return Session(server, scheduler, timeout, output)


def verb(app: typer.Typer, name: str, example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes a session and its own options; the common ones are added.

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
            with _common(**{name: options.pop(name) for name in common}) as session:
                for name, group in groups.items():
                    options[name] = group(**{member: options.pop(member) for member in members[name]})
                try:
                    function(session, **options)
                except BrokenPipeError:
                    # The reader went away, as `| head` does; the rest of the output is dropped.
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
    """Asks before blocks, rules or quotas are lost. Raises CommandError for a no, or without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("is needed without a terminal", param_hint="--yes")
    if not typer.confirm(question, err=True):
        raise CommandError("not confirmed: nothing was changed", Status.REFUSED)


def call_confirmed(
    remote: Remote[Any],
    method: Callable[..., R],
    request: Any,
    question: Callable[[R], str],
    *,
    dry_run: bool,
    yes: bool,
) -> R:
    """The answer of a call that loses something: first with validate_only, then, unless `dry_run`, once confirmed.

    question: from the first answer. Raises CommandError.
    """
    request.validate_only = True
    answer = remote.call(method, request)
    if not dry_run:
        confirm(question(answer), yes=yes)
        request.validate_only = False
        answer = remote.call(method, request)
    return answer
