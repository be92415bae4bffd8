"""The cache managers of a stack or a fleet, and their answers to one question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from kvctl.display.output import Column, Data, names, table
from kvctl.remote import Remote
from kvctl.status import CommandError, Status
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as rpc

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741


@dataclass(frozen=True)
class Shard:
    """A cache manager, by its address for operators. data_address: of its data plane, empty if it is not known."""

    admin: Remote[rpc.CacheAdminServiceStub]
    events: Remote[rpc.CacheEventServiceStub]
    data_address: str = ""

    @property
    def address(self) -> str:
        return self.admin.address

    def pools(self) -> list[pb.Pool]:
        """All pools with their counters. Raises CommandError."""
        return list(self.admin.all_pages(self.admin.stub.ListPools, pb.ListPoolsRequest(), "pools").pools)

    def quotas(self) -> pb.ListQuotasResponse:
        """All quotas with the blocks of their accounts. Raises CommandError."""
        return self.admin.all_pages(self.admin.stub.ListQuotas, pb.ListQuotasRequest(), "quotas")

    def rules(self) -> pb.ListRetentionRulesResponse:
        """All rules in the order in which they are matched. Raises CommandError."""
        return self.admin.all_pages(self.admin.stub.ListRetentionRules, pb.ListRetentionRulesRequest(), "rules")

    def holds(self) -> pb.ListHoldsResponse:
        """All pins and holds. Raises CommandError."""
        return self.admin.all_pages(self.admin.stub.ListHolds, pb.ListHoldsRequest(), "holds")


class ShardsError(CommandError):
    """Calls to some shards have failed, or the shards of some engines are not known."""

    def __init__(self, failures: Mapping[str, CommandError]) -> None:
        said = [str(error) if address in str(error) else f"{address}: {error}" for address, error in failures.items()]
        # An error that all shards have is shown once.
        messages = {str(error) for error in failures.values()}
        statuses = [error.status for error in failures.values()]
        super().__init__(
            messages.pop() if len(messages) == 1 else "; ".join(said),
            max(statuses),
            is_missing=all(error.is_missing for error in failures.values()),
        )


@dataclass
class Answers(Generic[T]):
    """Answers of shards by address. failures: errors of other shards. without: shards that lack the thing.

    several: whether several shards were asked; else the output does not mention shards.
    """

    by_shard: dict[str, T]
    failures: dict[str, CommandError] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    several: bool = False

    def check(self) -> None:
        """Raises ShardsError if a shard has failed."""
        if self.failures:
            raise ShardsError(self.failures)

    def leave_out_missing(self) -> Answers[T]:
        """The same answers, but a missing thing is no failure of a shard if another shard has the thing."""
        self.without += [address for address, error in self.failures.items() if error.is_missing]
        self.failures = {address: error for address, error in self.failures.items() if not error.is_missing}
        return self

    def data(self, of: Callable[[T], Data]) -> Data:
        """The answers for programs: a single shard's answer alone; several answers by address, with the errors."""
        if not self.several:
            [answer] = self.by_shard.values()
            return of(answer)
        shards: dict[str, Data] = {address: of(answer) for address, answer in self.by_shard.items()}
        shards |= dict.fromkeys(self.without)
        shards |= {address: {"error": str(error)} for address, error in self.failures.items()}
        return {"shards": shards}

    def listing(self, columns: Sequence[Column[I]], items: Callable[[T], Iterable[I]], *, wide: bool) -> str:
        """One table of all answers, with the shard in front of each row if there are several."""
        rows = [(address, item) for address, answer in self.by_shard.items() for item in items(answer)]
        lifted = [_behind(column) for column in columns]
        if self.several:
            lifted.insert(0, Column("SHARD", lambda row: row[0]))
        return table(lifted, rows, wide=wide)

    def names(self, columns: Sequence[Column[I]], items: Callable[[T], Iterable[I]]) -> str:
        """The names of the rows of `listing`, each once."""
        return names(columns, [item for answer in self.by_shard.values() for item in items(answer)])

    def paragraphs(self, text: Callable[[T, str], str]) -> str:
        """The answers in words, one after the other.

        text: makes the words from an answer and its shard's address, which is empty if only one shard was asked.
        """
        parts = (text(answer, address if self.several else "") for address, answer in self.by_shard.items())
        return "\n\n".join(parts)

    def lines(self, text: Callable[[T], str], none: str = "has none") -> str:
        """The answers in words, with the shard in front of each line if there are several."""
        if not self.several:
            return "\n".join(map(text, self.by_shard.values()))
        said = [f"{address}: {line}" for address, one in self.by_shard.items() for line in text(one).splitlines()]
        return "\n".join([*said, *(f"{address}: {none}" for address in self.without)])


def _behind(column: Column[I]) -> Column[tuple[str, I]]:
    return Column(column.header, lambda row: column.cell(row[1]), column.wide)


def ask(
    shards: Sequence[Shard],
    call: Callable[[Shard], T],
    failures: Mapping[str, CommandError] = MappingProxyType({}),
    *,
    several: bool | None = None,
) -> Answers[T]:
    """The answers of shards, asked one after the other. Raises CommandError if no shard answers.

    failures: of shards that are not asked, or engines whose shard is not known. several: as in Answers.
    """
    if several is None:
        several = len(shards) + len(failures) > 1
    answers = Answers[T]({}, dict(failures), several=several)
    for shard in shards:
        try:
            answers.by_shard[shard.address] = call(shard)
        except CommandError as error:
            if not answers.several:
                raise
            answers.failures[shard.address] = error
    if not answers.by_shard:
        answers.check()
    return answers


def owner_of(executor_id: str, pools: Answers[Sequence[pb.Pool]]) -> str:
    """The address of the shard that has an executor. Raises CommandError if no shard has it, or several do."""
    found = [
        address
        for address, listed in pools.by_shard.items()
        if any(pool.pool_id.rpartition("/")[0] == executor_id for pool in listed)
    ]
    if len(found) > 1:
        raise CommandError(
            f"{executor_id} is an executor of {' and of '.join(found)}: name one of them with --server", Status.USAGE
        )
    if not found:
        # A shard that does not answer may have the executor.
        pools.check()
        raise CommandError(f"no shard has the executor {executor_id!r}", Status.REFUSED, is_missing=True)
    return found[0]


def named(kind: str, name: str, listed: Iterable[tuple[str, Any]]) -> Any:
    """The thing of this name in a listing. Raises CommandError if there is none."""
    for its_name, item in listed:
        if its_name == name:
            return item
    raise CommandError(f"there is no {kind} {name!r}", Status.REFUSED, is_missing=True)
