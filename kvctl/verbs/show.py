"""Verbs that only read."""

import time
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvctl.display import tables
from kvctl.display.output import Column, as_yaml, table
from kvctl.options import (
    Adapter,
    Chat,
    Executor,
    File,
    Limit,
    MaxPriority,
    Pool,
    Salt,
    SessionId,
    Tenant,
    Text,
    TierName,
    Tokens,
    block_filter,
    prefix_of,
    prompt_of,
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
    pool: Pool = "",
    salt: Salt = None,
    tenant: Tenant = None,
    session_id: SessionId = None,
    adapter: Adapter = None,
    tier: TierName = "",
    max_priority: MaxPriority = None,
    limit: Limit = 0,
) -> None:
    """List cached chains of blocks by their last block."""
    admin, whole = session.admin, pb.ListPrefixesResponse()
    for pool_id in _pools(session, pool):
        request = pb.ListPrefixesRequest(
            pool_id=pool_id, filter=block_filter(salt, tenant, session_id, adapter, tier, max_priority)
        )
        left = _left(limit, len(whole.prefixes))
        if left is not None:
            whole.MergeFrom(admin.all_pages(admin.stub.ListPrefixes, request, "prefixes", left))
    session.show(whole, lambda wide: table(tables.PREFIXES, whole.prefixes, wide=wide))


@verb(app, "blocks", "kvctl blocks --tier host --limit 20")
def blocks(
    session: Session,
    pool: Pool = "",
    salt: Salt = None,
    tenant: Tenant = None,
    session_id: SessionId = None,
    adapter: Adapter = None,
    tier: TierName = "",
    max_priority: MaxPriority = None,
    tokens: Tokens = None,
    file: File = None,
    text: Text = None,
    chat: Chat = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Show the tokens of each block (wide, JSON).")] = False,
    limit: Limit = 0,
) -> None:
    """List blocks in use or cached. Any filter leaves only those in the index."""
    admin, whole = session.admin, pb.ListBlocksResponse()
    prompt = prompt_of(session, tokens, file, text, chat)
    chosen = block_filter(salt, tenant, session_id, adapter, tier, max_priority, prompt=prompt)
    for pool_id in _pools(session, pool):
        request = pb.ListBlocksRequest(pool_id=pool_id, include_token_ids=token_ids)
        if chosen.ByteSize():
            request.filter.CopyFrom(chosen)
        left = _left(limit, len(whole.blocks))
        if left is not None:
            whole.MergeFrom(admin.all_pages(admin.stub.ListBlocks, request, "blocks", left))
    session.show(whole, lambda wide: table(tables.BLOCKS, whole.blocks, wide=wide))


@verb(app, "leases", "kvctl leases --holder rule/acme")
def leases(
    session: Session,
    pool: Pool = "",
    holder: Annotated[str, typer.Option(help='Of this holder: "rule/NAME", "session/ID" and so on.')] = "",
    limit: Limit = 0,
) -> None:
    """List the leases that are held now."""
    admin, whole = session.admin, pb.ListLeasesResponse()
    for pool_id in _pools(session, pool):
        request = pb.ListLeasesRequest(pool_id=pool_id, holder=holder)
        left = _left(limit, len(whole.leases))
        if left is not None:
            whole.MergeFrom(admin.all_pages(admin.stub.ListLeases, request, "leases", left))
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
    tokens: Tokens = None,
    file: File = None,
    text: Text = None,
    chat: Chat = None,
    sequence: Annotated[str, typer.Option(help="A live sequence, instead of a prompt.")] = "",
    salt: Salt = None,
    adapter: Adapter = None,
    executor: Executor = "",
    group: Annotated[int, typer.Option(min=0, help="Layer group.")] = 0,
) -> None:
    """Say where a prompt's blocks are. At the first missing block, say why."""
    prefix = prefix_of(prompt_of(session, tokens, file, text, chat), salt, adapter, executor)
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
        "pools": list(admin.all_pages(stub.ListPools, pb.ListPoolsRequest(), "pools").pools),
        "rules": list(admin.all_pages(stub.ListRetentionRules, pb.ListRetentionRulesRequest(), "rules").rules),
        "quotas": list(admin.all_pages(stub.ListQuotas, pb.ListQuotasRequest(), "quotas").quotas),
        "holds": list(admin.all_pages(stub.ListHolds, pb.ListHoldsRequest(), "holds").holds),
    }


def _named(kind: str, name: str, listed: Any) -> Any:
    for its_name, item in listed:
        if its_name == name:
            return item
    raise CommandError(f"there is no {kind} {name!r}", Status.REFUSED)


def _pools(session: Session, pool: str) -> list[str]:
    if pool:
        return [pool]
    admin = session.admin
    return [item.pool_id for item in admin.all_pages(admin.stub.ListPools, pb.ListPoolsRequest(), "pools").pools]


def _left(limit: int, have: int) -> int | None:
    """How many more may be listed, 0 for all; None when there are enough."""
    if not limit:
        return 0
    return limit - have if have < limit else None
