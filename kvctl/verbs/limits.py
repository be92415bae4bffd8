"""`kvctl limits`: a client that finds the limits of a running stack, with or without token eviction."""

import asyncio
import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import grpc
import typer

from kvctl.display.output import Data, Format, blocks
from kvctl.measure.limit_search import Checker, LimitsError, Load, Round, best, double, double_and_bisect
from kvctl.measure.readings import sees_all
from kvctl.options import DryRun, Yes
from kvctl.session import Session, confirm, verb
from kvctl.status import CommandError, Status, command_error
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.channel import open_channel
from protos.rpc.errors import RemoteError, from_rpc_error
from protos.rpc.security import Security

KINDS = {
    name.removeprefix("EVICTION_KIND_").lower(): name
    for name, number in common.EvictionKind.items()
    if number > common.EVICTION_KIND_NONE
}

CALLER_OPTION = "--caller-token-file"
CallerToken = Annotated[
    Path | None,
    typer.Option(
        CALLER_OPTION,
        envvar="KVCTL_CALLER_TOKEN_FILE",
        help="File with a caller's token, if tokens are required: operators and viewers may not generate.",
    ),
]

app = typer.Typer()


class Mode(StrEnum):
    """Which limit is searched."""

    GEN_LENGTH = "gen_length"
    GEN_THROUGHPUT = "gen_throughput"

    @property
    def unit(self) -> str:
        """The unit that grows from round to round."""
        return "tokens" if self is Mode.GEN_LENGTH else "prompts"


@verb(app, "limits", "kvctl limits --mode gen_length --round-seconds 60 --yes")
def limits(
    session: Session,
    mode: Annotated[Mode, typer.Option(help="The longest output of a prompt, or the most prompts at once.")],
    round_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that a round may take.")] = 120.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt, with gen_throughput.")] = 128,
    policy: Annotated[str, typer.Option(help=f"How to evict tokens: {', '.join(KINDS)}.")] = "",
    start: Annotated[int | None, typer.Option(min=0, help="First tokens, which always stay.")] = None,
    recent: Annotated[int | None, typer.Option(min=0, help="Last tokens, which always stay.")] = None,
    budget: Annotated[int | None, typer.Option(min=0, help="Tokens that a sequence may keep.")] = None,
    period: Annotated[int | None, typer.Option(min=0, help="Tokens of one eviction.")] = None,
    during_prefill: Annotated[bool, typer.Option("--during-prefill", help="Evict during the prefill, too.")] = False,
    compacted: Annotated[bool, typer.Option("--compacted", help="Number the kept tokens without gaps.")] = False,
    target: Annotated[Path, typer.Option("--csv", help="New file for a line per round.")] = Path("limits.csv"),
    scheduler_metrics: Annotated[str, typer.Option(envvar="KVKEEP_SCHEDULER_METRICS_ADDRESS")] = "",
    cachemgr_metrics: Annotated[str, typer.Option(envvar="KVKEEP_CACHEMGR_METRICS_ADDRESS")] = "",
    executor_metrics: Annotated[str, typer.Option(envvar="KVKEEP_EXECUTOR_METRICS_ADDRESS")] = "",
    caller_token_file: CallerToken = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Find the limits of a stack. Grows a load until a round takes too long or the cache is exhausted.

    gen_length asks for 1, 2, 4, ... tokens from one prompt; gen_throughput doubles the prompts and then bisects. The
    cache is exhausted when a request has to wait for blocks, is preempted for lack of blocks, or is refused as too
    long. With the addresses of the processes' metrics, the resident memory is shown. The load evicts cached blocks, and
    other requests wait: run this on a stack without users.
    """
    sizes = {"start_tokens": start, "recent_tokens": recent, "max_cache_tokens": budget, "period_tokens": period}
    found = {"scheduler": scheduler_metrics, "cachemgr": cachemgr_metrics, "executor": executor_metrics}
    how = policy_of(policy, sizes, during_prefill=during_prefill, compacted=compacted)
    load = Load(prompt_tokens, round_seconds, how)
    caller = _caller(session.security, caller_token_file)
    metrics = {name: address for name, address in found.items() if address}
    task = _Task(session, caller, mode, load, output_tokens, metrics, target)
    if target.is_file() and target.stat().st_size:
        raise typer.BadParameter(f"{target} is there already: name a new file", param_hint="--csv")
    cached = _cached_blocks(session)
    effect = f"other requests wait, and up to {blocks(cached)} are evicted"
    if dry_run:
        would = f"would load the stack to its limits: {effect}; a line per round in {target}"
        session.show({"cached_blocks": cached}, lambda _wide: would)
        return
    confirm(f"Load the stack to its limits? Until the end {effect}.", yes=yes)
    task.run()


def _caller(own: Security, token_file: Path | None) -> Security:
    """The security of calls that generate. Raises typer.BadParameter."""
    if token_file is None:
        if own.token_file is None:
            return own
        raise typer.BadParameter(
            "is needed beside KVKEEP_TOKEN_FILE: operators and viewers may not generate", param_hint=CALLER_OPTION
        )
    if own.token_file is None:
        raise typer.BadParameter(
            "needs KVKEEP_TOKEN_FILE beside it, with an operator's or a viewer's: callers may not see the pools",
            param_hint=CALLER_OPTION,
        )
    made = replace(own, token_file=token_file)
    try:
        made.token()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=CALLER_OPTION) from None
    return made


def _cached_blocks(session: Session) -> int:
    """Blocks that a load may evict, over all tiers. Raises CommandError without a pool, or for a tenant's token."""
    pools = session.shard.pools()
    if not pools:
        raise CommandError("no executor is registered", Status.REFUSED)
    if not sees_all(pools):
        raise CommandError("the token of KVKEEP_TOKEN_FILE is a tenant's: it does not see the pools", Status.REFUSED)
    return sum(pool.cached_blocks + sum(tier.cached_blocks for tier in pool.lower_tiers) for pool in pools)


def policy_of(
    kind: str, sizes: dict[str, int | None], *, during_prefill: bool, compacted: bool
) -> common.EvictionPolicy | None:
    """The policy that the options name, or None. Raises typer.BadParameter."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if not kind:
        if given or during_prefill or compacted:
            raise typer.BadParameter("say which policy: --policy norm_sum", param_hint="--policy")
        return None
    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(KINDS)}", param_hint="--policy")
    positions = common.EVICTION_POSITIONS_COMPACTED if compacted else common.EVICTION_POSITIONS_ABSOLUTE
    made = common.EvictionPolicy(kind=KINDS[kind], during_prefill=during_prefill, positions=positions)
    for name, value in given.items():
        setattr(made, name, value)
    return made


@dataclass(frozen=True)
class _Task:
    """One search. caller: the security of generating calls. metrics: address by process."""

    session: Session
    caller: Security
    mode: Mode
    load: Load
    output_tokens: int
    metrics: dict[str, str]
    target: Path

    def run(self) -> None:
        """Searches, writes the file and shows the result. Raises CommandError; typer.BadParameter for the file."""
        address = f"{self.session.scheduler.address} or {self.session.shard.address}"
        try:
            # Appends, so that a file that was made in the meantime is not overwritten.
            with self.target.open("a", newline="") as file:
                rounds = asyncio.run(self._search(file))
        except grpc.RpcError as error:
            raise command_error(from_rpc_error(error), address) from None
        except RemoteError as error:
            raise command_error(error, address) from None
        except LimitsError as error:
            raise CommandError(str(error), Status.REFUSED) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--csv") from None
        data = {"mode": self.mode.value, "best": best(rounds), "rounds": [self._row(item) for item in rounds]}
        self.session.show(data, lambda _wide: self._summary(rounds))

    async def _search(self, file: TextIO) -> list[Round]:
        writer = csv.DictWriter(file, list(self._row(Round(0))))
        session = self.session
        async with (
            open_channel(session.scheduler.address, self.caller) as scheduler,
            open_channel(session.shard.address, session.security) as admin,
        ):
            checker = Checker(scheduler, admin, self.load, self.metrics, session.security, session.timeout)

            async def run(size: int) -> Round:
                if self.mode is Mode.GEN_LENGTH:
                    made = await checker.output_of(size)
                else:
                    made = await checker.prompts_at_once(size, self.output_tokens)
                if not file.tell():
                    writer.writeheader()
                writer.writerow(self._row(made))
                file.flush()
                # Programs read a single answer at the end.
                typer.echo(self._progress(made), err=session.output in (Format.JSON, Format.YAML))
                return made

            return await (double(run) if self.mode is Mode.GEN_LENGTH else double_and_bisect(run))

    def _row(self, made: Round) -> dict[str, Data]:
        """A round as a line of the file, and for programs."""
        row: dict[str, Data] = {
            "mode": self.mode.value,
            self.mode.unit: made.size,
            "seconds": round(made.seconds, 3),
            "output_tokens": made.output_tokens,
            "ending": made.ending.value,
            "cache_mean": round(made.cache_mean, 4),
            "cache_most": round(made.cache_most, 4),
        }
        return row | {f"{name}_resident_bytes": made.resident.get(name) for name in self.metrics}

    def _progress(self, made: Round) -> str:
        rate = made.output_tokens / made.seconds if made.seconds else 0.0
        return (
            f"{made.size:>8} {self.mode.unit}  {made.seconds:8.2f} s  {rate:8.1f} tokens/s  "
            f"cache {made.cache_mean:6.1%} on average, {made.cache_most:6.1%} at most  {made.ending}"
        )

    def _summary(self, rounds: Sequence[Round]) -> str:
        limit = "longest output" if self.mode is Mode.GEN_LENGTH else "most prompts at once"
        failed = min((item for item in rounds if item.size > best(rounds)), key=lambda item: item.size)
        shares = [share for item in rounds for share in item.cache]
        lines = [
            f"{limit}: {best(rounds)} {self.mode.unit}; {failed.size}: {failed.ending}",
            f"cache use: {sum(shares) / max(1, len(shares)):.1%} on average, {max(shares, default=0):.1%} at most",
        ]
        if self.metrics:
            most = {name: max(item.resident.get(name, 0) for item in rounds) for name in self.metrics}
            lines.append("resident memory: " + ", ".join(f"{name} {held / 1e6:.0f} MB" for name, held in most.items()))
        return "\n".join([*lines, f"every round is in {self.target}"])
