"""Verbs that only read."""

import time
from collections.abc import Callable
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvctl.display import tables
from kvctl.display.output import Column, as_yaml, table
from kvctl.options import (
    Adapter,
    Executor,
    Limit,
    Pool,
    Prompt,
    Salt,
    Selection,
)
from kvctl.session import CACHEMGR, EXECUTOR, Session, verb
from kvctl.status import CommandError, Status
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import from_rpc_error

app = typer.Typer()

CachemgrAddress = Annotated[
    str, typer.Option("--cachemgr", envvar="KVKEEP_CACHEMGR_ADDRESS", help="Where the cache manager's data plane is.")
]
_GONE = "no answer"


@verb(app, "ping", "kvctl ping")
def ping(
    session: Session,
    cachemgr: CachemgrAddress = CACHEMGR,
    executor: Annotated[str, typer.Option(envvar="KVKEEP_EXECUTOR_ADDRESS", help="Where the executor serves.")] = (
        EXECUTOR
    ),
) -> None:
    """Ask every service whether it serves. Exits with 3 when one cannot be reached, with 1 when one does not serve."""
    places = (
        ("scheduler", session.scheduler.address, "generation.v1.GenerationService"),
        ("cachemgr", cachemgr, "kvcache.v1.CacheManagerService"),
        ("admin", session.admin.address, "kvcache.v1.CacheAdminService"),
        ("executor", executor, "execution.v1.ExecutorService"),
    )
    found = [_ask(session, name, address, service) for name, address, service in places]
    columns = [Column[dict[str, Any]](name.upper(), lambda item, name=name: item[name]) for name in found[0]]  # type: ignore[misc]
    session.show({"services": found}, lambda wide: table(columns, found, wide=wide))
    said = {item["status"] for item in found}
    if said != {"serving"}:
        raise typer.Exit(Status.UNREACHABLE if _GONE in said else Status.FOUND)


def _ask(session: Session, name: str, address: str, service: str) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        health = health_pb2_grpc.HealthStub(session.at(address)).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=session.timeout
        )
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status).lower().replace("_", " ")
    except grpc.RpcError as error:
        remote = from_rpc_error(error)
        gone = remote.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        status = _GONE if gone else remote.code.name.lower().replace("_", " ")
    return {"name": name, "address": address, "status": status, "ms": round((time.monotonic() - begin) * 1000, 1)}


@verb(app, "pools", "kvctl pools -o wide")
def pools(session: Session) -> None:
    """List pools: used, cached and free blocks, and hits."""
    admin = session.admin
    answer = admin.all_pages(admin.stub.ListPools, pb.ListPoolsRequest(), "pools")
    session.show(answer, lambda wide: table(tables.POOLS, answer.pools, wide=wide))


@verb(app, "sequences", "kvctl sequences --salt acme")
def sequences(
    session: Session,
    executor: Executor = "",
    scheduler_id: Annotated[str, typer.Option(help="Of this scheduler; of all without it.")] = "",
    salt: Salt = None,
    limit: Limit = 0,
) -> None:
    """List live sequences with their tokens and blocks."""
    admin = session.admin
    request = pb.ListSequencesRequest(executor_id=executor, scheduler_id=scheduler_id, salt=salt)
    answer = admin.all_pages(admin.stub.ListSequences, request, "sequences", limit)
    session.show(answer, lambda wide: table(tables.SEQUENCES, answer.sequences, wide=wide))


@verb(app, "prefixes", "kvctl prefixes --salt acme --limit 20")
def prefixes(
    session: Session,
    *,
    pool: Pool = "",
    selected: Selection,
    limit: Limit = 0,
) -> None:
    """List cached chains of blocks by their last block."""
    request, whole = pb.ListPrefixesRequest(filter=selected.filter()), pb.ListPrefixesResponse()
    _add_pools(session, pool, session.admin.stub.ListPrefixes, request, whole, "prefixes", limit)
    session.show(whole, lambda wide: table(tables.PREFIXES, whole.prefixes, wide=wide))


@verb(app, "blocks", "kvctl blocks --tier host --limit 20")
def blocks(
    session: Session,
    *,
    pool: Pool = "",
    selected: Selection,
    prompt: Prompt,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Show the tokens of each block (wide, JSON).")] = False,
    limit: Limit = 0,
) -> None:
    """List blocks in use or cached. Any filter leaves only those in the index."""
    request, whole = pb.ListBlocksRequest(include_token_ids=token_ids), pb.ListBlocksResponse()
    chosen = selected.filter(prefix=prompt.prefix(session, selected.salt, selected.adapter, ""))
    if chosen.ByteSize():
        request.filter.CopyFrom(chosen)
    _add_pools(session, pool, session.admin.stub.ListBlocks, request, whole, "blocks", limit)
    session.show(whole, lambda wide: table(tables.BLOCKS, whole.blocks, wide=wide))


@verb(app, "leases", "kvctl leases --holder rule/acme")
def leases(
    session: Session,
    pool: Pool = "",
    holder: Annotated[str, typer.Option(help='Of this holder: "rule/NAME", "session/ID" and so on.')] = "",
    limit: Limit = 0,
) -> None:
    """List the leases that are held now."""
    request, whole = pb.ListLeasesRequest(holder=holder), pb.ListLeasesResponse()
    _add_pools(session, pool, session.admin.stub.ListLeases, request, whole, "leases", limit)
    session.show(whole, lambda wide: table(tables.LEASES, whole.leases, wide=wide))


@verb(app, "holds", "kvctl holds --owner ops")
def holds(session: Session, owner: Annotated[str, typer.Option(help="Of this owner.")] = "", limit: Limit = 0) -> None:
    """List pins, and holds of ended sequences. `kvctl unpin` ends one."""
    admin = session.admin
    answer = admin.all_pages(admin.stub.ListHolds, pb.ListHoldsRequest(owner=owner), "holds", limit)
    session.show(answer, lambda wide: table(tables.HOLDS, answer.holds, wide=wide))


@verb(app, "explain", "kvctl explain --tokens 1,2,3 --salt acme")
def explain(
    session: Session,
    *,
    prompt: Prompt,
    sequence: Annotated[str, typer.Option(help="A live sequence, instead of a prompt.")] = "",
    salt: Salt = None,
    adapter: Adapter = None,
    executor: Executor = "",
    group: Annotated[int, typer.Option(min=0, help="Layer group.")] = 0,
) -> None:
    """Say where a prompt's blocks are. At the first missing block, say why."""
    prefix = prompt.prefix(session, salt, adapter, executor)
    if (prefix is None) == (not sequence):
        raise typer.BadParameter("name a prompt or a sequence", param_hint="--tokens")
    request = pb.ExplainPrefixRequest(prefix=prefix, group=group)
    if sequence:
        request.sequence_id = sequence
    answer = session.admin.call(session.admin.stub.ExplainPrefix, request)
    session.show(answer, lambda wide: tables.explanations(answer, wide=wide))


@verb(app, "describe", "kvctl describe pool executor-0/0")
def describe(
    session: Session,
    kind: Annotated[str, typer.Argument(help="pool, sequence, rule or hold; the whole stack without it.")] = "",
    name: Annotated[str, typer.Argument(help="Its name, as the listing of its kind shows it.")] = "",
) -> None:
    """Show all about a pool, sequence, rule or hold, or the whole stack. As YAML, or JSON."""
    admin = session.admin
    stub = admin.stub
    if kind and not name:
        raise typer.BadParameter(f"name the {kind}", param_hint="NAME")
    match kind:
        case "":
            data: Any = _stack(session)
        case "pool":
            data = {
                "pool": admin.call(stub.GetPool, pb.GetPoolRequest(pool_id=name)).pool,
                "stats": admin.call(stub.GetStats, pb.GetStatsRequest(pool_id=name)),
            }
        case "sequence":
            listed = admin.all_pages(stub.ListSequences, pb.ListSequencesRequest(), "sequences").sequences
            data = _named(kind, name, ((item.sequence_id, item) for item in listed))
        case "rule":
            data = admin.call(stub.GetRetentionRule, pb.GetRetentionRuleRequest(name=name)).rule
        case "hold":
            data = hold_named(session, name)
        case _:
            raise typer.BadParameter(f"{kind!r} is none of pool, sequence, rule, hold", param_hint="KIND")
    session.show(data, lambda _wide: as_yaml(data))


def hold_named(session: Session, name: str) -> pb.Hold:
    """A hold or pin. Raises CommandError when there is none of this name."""
    admin = session.admin
    listed = admin.all_pages(admin.stub.ListHolds, pb.ListHoldsRequest(), "holds").holds
    found: pb.Hold = _named("hold", name, ((item.name, item) for item in listed))
    return found


@verb(app, "state", "kvctl state --hash")
def state(
    session: Session, only_hash: Annotated[bool, typer.Option("--hash", help="Show its hash only.")] = False
) -> None:
    """Show the cache manager's state, or its hash. Lines of JSON, without token ids."""
    admin, whole = session.admin, pb.DumpStateResponse()
    for part in admin.messages(admin.stub.DumpState, pb.DumpStateRequest(), session.timeout, ends=False):
        whole.MergeFrom(part)
    if only_hash:
        whole.ClearField("lines")
    session.show(whole, lambda _wide: whole.state_hash if only_hash else "\n".join(whole.lines))


@verb(app, "fsck", "kvctl fsck")
def fsck(
    session: Session,
    pool: Pool = "",
    store: Annotated[bool, typer.Option("--store/--no-store", help="Compare with Redis, too.")] = True,
) -> None:
    """Recount all blocks and compare them with Redis. Exits with 1 for a contradiction, or without Redis."""
    answer = session.admin.call(
        session.admin.stub.CheckPool, pb.CheckPoolRequest(pool_id=pool, compare_with_store=store)
    )
    session.show(answer, lambda wide: tables.check(answer, store=store, wide=wide))
    if answer.violations or answer.store_compared != store:
        raise typer.Exit(Status.FOUND)


def _stack(session: Session) -> dict[str, Any]:
    admin, scheduler = session.admin, session.scheduler
    stub = admin.stub
    return {
        "model": scheduler.call(scheduler.stub.GetModel, generation_pb2.GetModelRequest()),
        "loads": scheduler.call(scheduler.stub.GetLoads, generation_pb2.GetLoadsRequest()),
        "pools": session.pools(),
        "rules": list(admin.all_pages(stub.ListRetentionRules, pb.ListRetentionRulesRequest(), "rules").rules),
        "quotas": list(session.quotas().quotas),
        "holds": list(admin.all_pages(stub.ListHolds, pb.ListHoldsRequest(), "holds").holds),
    }


def _named(kind: str, name: str, listed: Any) -> Any:
    for its_name, item in listed:
        if its_name == name:
            return item
    raise CommandError(f"there is no {kind} {name!r}", Status.REFUSED)


def _add_pools(
    session: Session, pool: str, method: Callable[..., Any], request: Any, whole: Any, items: str, limit: int
) -> None:
    """Adds the listings of a pool, or of all without one. items: their field; limit: how many in all, 0 for all."""
    listed = getattr(whole, items)
    for pool_id in [pool] if pool else [item.pool_id for item in session.pools()]:
        if limit and len(listed) >= limit:
            return
        request.pool_id, request.page_token = pool_id, ""
        whole.MergeFrom(session.admin.all_pages(method, request, items, limit and limit - len(listed)))
