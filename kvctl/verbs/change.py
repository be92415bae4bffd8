"""Verbs that change the cache, or how long blocks stay in it."""

from typing import Annotated

import typer

from kvctl.display.output import blocks, number, printable, span
from kvctl.display.tables import counts
from kvctl.options import (
    Adapter,
    DryRun,
    Executor,
    Pool,
    Prompt,
    Salt,
    Selection,
    Yes,
    duration_of,
    required,
    user,
)
from kvctl.session import CACHEMGR, Session, addresses_of, ask_confirmed, confirm, verb
from kvctl.shards import Shard, named
from kvctl.status import Status
from kvctl.verbs.show import CachemgrAddress
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.durations import seconds

app = typer.Typer()


@verb(app, "pin", "kvctl pin --tokens 1,2,3 --for 1h --owner ops")
def pin(
    session: Session,
    *,
    lasts: Annotated[str, typer.Option("--for", help="How long: 90s, 1h30m, 2d.")],
    prompt: Prompt,
    salt: Salt = None,
    adapter: Adapter = None,
    executor: Executor = "",
    owner: Annotated[str, typer.Option(help="Owner of the pin; by default you.")] = "",
    dry_run: DryRun = False,
) -> None:
    """Keep a prompt's cached blocks. There is a budget for pins; exits with 4 when nothing was pinned."""
    prefix = required(prompt.prefix(session, salt, adapter, executor))
    request = pb.PinPrefixRequest(
        prefix=prefix, owner=owner or user(), duration=duration_of(lasts, "--for"), validate_only=dry_run
    )

    def pinned(shard: Shard) -> tuple[pb.PinPrefixResponse, int]:
        answer = shard.admin.call(shard.admin.stub.PinPrefix, request)
        sizes = [pool.block_size for pool in shard.pools() if executor in ("", pool.pool_id.rpartition("/")[0])]
        return answer, len(prefix.token_ids) % sizes[0] if sizes else 0

    found = session.ask(pinned, executor=executor)
    session.show_all(
        found,
        lambda _wide: found.lines(lambda one: _pinned(one[0], one[1], dry_run=dry_run)),
        lambda one: one[0],
    )
    if all(answer.receipt.outcome == common.OUTCOME_REJECTED for answer, _ in found.by_shard.values()):
        raise typer.Exit(Status.REFUSED)


def _pinned(answer: pb.PinPrefixResponse, rest: int, *, dry_run: bool) -> str:
    """rest: tokens of the prompt after its last full block."""
    receipt = answer.receipt
    if receipt.outcome == common.OUTCOME_REJECTED:
        return f"nothing {'would be ' if dry_run else ''}pinned: {receipt.reason}"
    lasts = span(seconds(receipt.retention_duration))
    lines = [f"{'would pin' if dry_run else 'pinned'} {blocks(receipt.num_blocks)} for {lasts}"]
    if receipt.reason:
        lines[0] += f": {receipt.reason}"
    lines += [f"left out: the last {number(rest, 'token')} of the prompt, which fill no block"] if rest else []
    lines += [f"name {name}" for name in answer.hold_names]
    lines += [f"degraded to a lease: {name}" for name in answer.degraded_hold_names]
    return "\n".join(lines)


@verb(app, "unpin", "kvctl unpin pin-1 --yes")
def unpin(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the pin or hold, as `kvctl holds` shows it.")],
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """End a pin or a hold. Its blocks become free, unless a sequence or another hold uses them."""
    found = session.ask(
        lambda shard: named("hold", name, ((hold.name, hold) for hold in shard.holds().holds))
    ).leave_out_missing()
    found.check()
    if len(found.by_shard) > 1:
        listed = ", ".join(found.by_shard)
        raise typer.BadParameter(f"several shards have a hold of this name: {listed}", param_hint="--server")
    [(address, hold)] = found.by_shard.items()
    held = f"{printable(name)} of {printable(hold.owner)}, {blocks(hold.num_blocks)}"
    if found.several:
        held += f", on {address}"
    if dry_run:
        session.show(hold, lambda _wide: f"would end {held}")
        return
    confirm(f"End {held}?", yes=yes)
    [shard] = [shard for shard in session.shards if shard.address == address]
    answer = shard.admin.call(shard.admin.stub.ReleaseHold, pb.ReleaseHoldRequest(name=name))
    session.show(answer, lambda _wide: f"ended {held}; {answer.freed_blocks} are free now")


@verb(app, "retain", "kvctl retain --tokens 1,2,3 --priority 80 --for 1h")
def retain(
    session: Session,
    *,
    priority: Annotated[int, typer.Option(min=0, max=100, help="0..100; a higher priority is kept longer.")],
    lasts: Annotated[str, typer.Option("--for", help="How long: 90s, 1h30m, 2d; by default without end.")] = "",
    prompt: Prompt,
    salt: Salt = None,
    adapter: Adapter = None,
    executor: Executor = "",
    session_id: Annotated[str | None, typer.Option("--session", help="For this session; by default for you.")] = None,
    cachemgr: CachemgrAddress = CACHEMGR,
) -> None:
    """Request retention of a prompt's cached blocks, in place of an earlier request of the same session or user.

    Exits with 4 if the request is rejected, or no block is cached.
    """
    prefix = required(prompt.prefix(session, salt, adapter, executor))
    action = common.HintAction(action_id="retain", action_type="Retain", action_version="0.1")
    action.payload.update({"priority": priority})
    if lasts:
        action.payload.update({"duration_seconds": seconds(duration_of(lasts, "--for"))})
    hints = common.KvHints(protocol_version="0.1", message_id=f"kvctl-{user()}", actions=[action])
    data_addresses = _data_addresses(session, cachemgr)

    def sent(shard: Shard) -> pb.SendHintsResponse:
        remote = session.cachemgr(data_addresses[shard.address])
        request = pb.SendHintsRequest(prefix=prefix, hints=hints, session_id=session_id)
        return remote.call(remote.stub.SendHints, request)

    found = session.ask(sent, executor=executor)
    session.show_all(found, lambda _wide: found.lines(_answered))
    outcomes = [said.outcome for answer in found.by_shard.values() for said in answer.answers]
    if not {common.HINT_OUTCOME_ACCEPTED, common.HINT_OUTCOME_CLIPPED} & set(outcomes):
        raise typer.Exit(Status.REFUSED)


def _data_addresses(session: Session, given: str) -> dict[str, str]:
    """Where the data plane of each shard is. Raises typer.BadParameter, CommandError."""
    known = {shard.address: shard.data_address for shard in session.shards}
    if all(known.values()):
        return known
    found = addresses_of(given, "--cachemgr")
    if len(found) != len(known):
        raise typer.BadParameter(f"names {len(found)} addresses for {len(known)} shards", param_hint="--cachemgr")
    return dict(zip(known, found, strict=True))


def _answered(answer: pb.SendHintsResponse) -> str:
    [said] = answer.answers
    outcome = common.HintOutcome.Name(said.outcome).removeprefix("HINT_OUTCOME_").lower()
    detail = f": {said.detail}" if said.detail else ""
    return f"{outcome}, {blocks(said.num_blocks)}{detail}"


@verb(app, "evict", "kvctl evict --salt acme --dry-run")
def evict(
    session: Session,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All cached blocks, without any filter.")] = False,
    pool: Pool = "",
    selected: Selection,
    prompt: Prompt,
    skip_used: Annotated[
        bool, typer.Option("--skip-used", help="Leave blocks that are in use, instead of refusing to evict.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Evict cached blocks. Their bytes stay until later blocks overwrite them; `kvctl forget` overwrites at once."""
    chosen = selected.filter(pool, prompt.prefix(session, selected.salt, selected.adapter, ""))
    if bool(chosen.ByteSize()) == everything:
        raise typer.BadParameter("give a filter, or --all for all cached blocks", param_hint="--all")

    def purge(shard: Shard, dry_run: bool) -> pb.PurgeBlocksResponse:
        request = pb.PurgeBlocksRequest(filter=chosen, skip_used=skip_used, validate_only=dry_run)
        return shard.admin.call(shard.admin.stub.PurgeBlocks, request)

    found = ask_confirmed(
        session, purge, lambda answer: f"Evict {_purged(answer)}?", dry_run=dry_run, yes=yes, pool=pool
    )
    done = "would evict" if dry_run else "evicted"
    session.show_all(found, lambda _wide: found.lines(lambda answer: f"{done} {_purged(answer)}"))


def _purged(answer: pb.PurgeBlocksResponse) -> str:
    used = f", and leave {answer.used_blocks} in use" if answer.used_blocks else ""
    return f"{blocks(answer.purged_blocks)}{used}"


@verb(app, "forget", "kvctl forget --salt acme --dry-run")
def forget(
    session: Session,
    *,
    salt: Annotated[str | None, typer.Option(help="All blocks under this salt; or the salt of the prompt.")] = None,
    session_id: Annotated[str | None, typer.Option("--session", help="All blocks that this session stored.")] = None,
    prompt: Prompt,
    adapter: Annotated[int | None, typer.Option(min=0, help="LoRA adapter of the prompt.")] = None,
    executor: Annotated[str, typer.Option(help="Executor of the prompt; by default all.")] = "",
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Remove blocks from all tiers and Redis. Their bytes are overwritten with zeros."""
    prefix = prompt.prefix(session, salt, adapter, executor)
    if prefix is not None and session_id is None:
        request = pb.ForgetBlocksRequest(prefix=prefix)
    elif prefix is None and salt is None and session_id is not None:
        request = pb.ForgetBlocksRequest(session_id=session_id)
    elif prefix is None and salt is not None and session_id is None:
        request = pb.ForgetBlocksRequest(salt=salt)
    else:
        raise typer.BadParameter("name a salt, a session or a prompt", param_hint="--salt")

    def remove(shard: Shard, dry_run: bool) -> pb.ForgetBlocksResponse:
        request.validate_only = dry_run
        return shard.admin.call(shard.admin.stub.ForgetBlocks, request)

    found = ask_confirmed(
        session,
        remove,
        lambda answer: f"Forget {_forgotten(answer)}?",
        dry_run=dry_run,
        yes=yes,
        executor=executor,
    )
    if not dry_run and not all(answer.store_updated for answer in found.by_shard.values()):
        typer.echo("warning: Redis is down and still has the blocks; they are removed when Redis is up again", err=True)
    done = "would forget" if dry_run else "forgot"
    session.show_all(found, lambda _wide: found.lines(lambda answer: f"{done} {_forgotten(answer)}"))


def _forgotten(answer: pb.ForgetBlocksResponse) -> str:
    text = f"blocks: {counts(answer.removed)}"
    if answer.used_blocks:
        text += f"; {answer.used_blocks} in use, overwritten when they are freed"
    if answer.shared_blocks:
        text += f"; {answer.shared_blocks} stay: other sessions use these blocks or their descendants"
    return text
