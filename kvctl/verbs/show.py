"""Verbs that only read."""

import contextlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvctl.display import tables
from kvctl.display.output import Column, Format, as_yaml, table
from kvctl.options import (
    Adapter,
    Executor,
    Limit,
    Pool,
    Prompt,
    Salt,
    Selection,
    required,
)
from kvctl.remote import Remote
from kvctl.session import CACHEMGR, EXECUTOR, Session, addresses_of, verb
from kvctl.shards import Answers, Shard, ask, named
from kvctl.status import CommandError, Status
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc import addresses
from protos.rpc.errors import from_rpc_error
from protos.rpc.version import VERSION_KEY
from protos.rpc.version import program_version as own_version

app = typer.Typer()

CachemgrAddress = Annotated[
    str,
    typer.Option(
        "--cachemgr",
        envvar="KVKEEP_CACHEMGR_ADDRESS",
        help="Addresses of the cache managers' data planes, with commas between them, in the order of --server; not "
        "needed for cache managers that a router names.",
    ),
]
ExecutorAddress = Annotated[str, typer.Option(envvar="KVKEEP_EXECUTOR_ADDRESS", help="Where the executor serves.")]
_GONE = "no answer"


def _columns(*fields: str) -> list[Column[dict[str, Any]]]:
    return [Column(field.upper(), lambda item, field=field: item[field]) for field in fields]  # type: ignore[misc]


_PINGED = _columns("name", "address", "status", "ms")
_VERSIONS = _columns("name", "address", "version")


@verb(app, "ping", "kvctl ping", lists=True)
def ping(session: Session, cachemgr: CachemgrAddress = CACHEMGR, executor: ExecutorAddress = EXECUTOR) -> None:
    """Ask every service whether it serves.

    Exits with 3 if a service cannot be reached, with 1 if a service does not serve. With a router these are the router,
    the schedulers of its engines, their executors as far as they can be reached from this machine, and the cache
    managers.
    """
    places = _services(session, cachemgr, executor)
    found = [_asked(session, *place) for place in places]
    answer = {"services": [{column.header.lower(): column.cell(item) for column in _PINGED} for item in found]}
    session.show_list(Answers({"": answer}), _PINGED, lambda answer: answer["services"], "services")
    said = {item["status"] for item in found}
    if said != {"serving"}:
        raise typer.Exit(Status.UNREACHABLE if _GONE in said else Status.FOUND)


@verb(app, "version", "kvctl version")
def version(session: Session, cachemgr: CachemgrAddress = CACHEMGR, executor: ExecutorAddress = EXECUTOR) -> None:
    """Show the versions of kvctl and of every service. Exits with 3 if a service cannot be reached."""
    services = [_asked(session, *place) for place in _services(session, cachemgr, executor)]
    own = {"name": "kvctl", "address": "", "version": own_version()}
    found = [own, *({name: item[name] for name in own} for item in services)]
    session.show({"versions": found}, lambda wide: table(_VERSIONS, found, wide=wide))
    if any(item["status"] == _GONE for item in services):
        raise typer.Exit(Status.UNREACHABLE)


def _services(session: Session, cachemgr: str, executor: str) -> list[tuple[str, str, str]]:
    """Name, address and service of every process."""
    executors = [] if session.router_address else [executor]
    if session.router_address:
        places = [("router", session.router_address, "generation.v1.RouterService")]
        # The router's engines are asked, too, if the router can list them.
        with contextlib.suppress(CommandError):
            places += [("scheduler", one.address, "generation.v1.GenerationService") for one in session.engines.engines]
            executors = [one.executor_address for one in session.engines.engines if can_be_asked(one)]
    else:
        places = [("scheduler", session.scheduler.address, "generation.v1.GenerationService")]
        places += [("cachemgr", one, "kvcache.v1.CacheManagerService") for one in addresses_of(cachemgr, "--cachemgr")]
    with contextlib.suppress(CommandError):
        places += [("admin", shard.address, "kvcache.v1.CacheAdminService") for shard in session.shards]
    return places + [("executor", one, "execution.v1.ExecutorService") for one in executors]


def can_be_asked(engine: generation_pb2.RoutedEngine) -> bool:
    """Whether the executor's address, from the scheduler's settings, means the same place on this machine."""
    if not engine.executor_address:
        return False
    return not addresses.is_loopback(engine.executor_address) or addresses.is_loopback(engine.address)


def _asked(session: Session, name: str, address: str, service: str) -> dict[str, Any]:
    begin, said = time.monotonic(), ""
    try:
        health, call = health_pb2_grpc.HealthStub(session.at(address)).Check.with_call(
            health_pb2.HealthCheckRequest(service=service), timeout=session.timeout
        )
        said = dict(call.trailing_metadata() or ()).get(VERSION_KEY, "unknown")
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status).lower().replace("_", " ")
    except grpc.RpcError as error:
        remote = from_rpc_error(error)
        gone = remote.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        status = _GONE if gone else remote.code.name.lower().replace("_", " ")
    elapsed = round((time.monotonic() - begin) * 1000, 1)
    return {"name": name, "address": address, "status": status, "ms": elapsed, "version": said or status}


@verb(app, "pools", "kvctl pools -o wide", lists=True)
def pools(session: Session) -> None:
    """List pools: used, cached and empty blocks, and hits.

    Each block counts once: it is in use, cached or empty. HOST and DISK are filled slots of all slots, including copies
    of blocks that are also on the device.
    """
    found = session.ask(lambda shard: pb.ListPoolsResponse(pools=shard.pools()))
    session.show_list(found, tables.POOLS, lambda answer: answer.pools, "pools")


@verb(app, "sequences", "kvctl sequences --salt acme", lists=True)
def sequences(
    session: Session,
    executor: Executor = "",
    scheduler_id: Annotated[str, typer.Option(help="Of this scheduler; by default of all.")] = "",
    salt: Salt = None,
    limit: Limit = 0,
) -> None:
    """List live sequences with their tokens and blocks."""
    left = _Limit(limit)

    def listed(shard: Shard) -> pb.ListSequencesResponse:
        whole = pb.ListSequencesResponse()
        request = pb.ListSequencesRequest(executor_id=executor, scheduler_id=scheduler_id, salt=salt)
        left.add(whole, shard.admin, shard.admin.stub.ListSequences, request, "sequences")
        return whole

    found = session.ask(listed, executor=executor)
    session.show_list(found, tables.SEQUENCES, lambda answer: answer.sequences, "sequences")


@verb(app, "prefixes", "kvctl prefixes --salt acme --limit 20", lists=True)
def prefixes(
    session: Session,
    *,
    pool: Pool = "",
    selected: Selection,
    limit: Limit = 0,
) -> None:
    """List cached chains of blocks by their last block."""
    left, chosen = _Limit(limit), selected.filter()

    def listed(shard: Shard) -> pb.ListPrefixesResponse:
        whole = pb.ListPrefixesResponse()
        left.add_pools(
            whole, shard, pool, shard.admin.stub.ListPrefixes, pb.ListPrefixesRequest(filter=chosen), "prefixes"
        )
        return whole

    found = session.ask(listed, pool=pool)
    session.show_list(found, tables.PREFIXES, lambda answer: answer.prefixes, "prefixes")


@verb(app, "blocks", "kvctl blocks --tier host --limit 20", lists=True)
def blocks(
    session: Session,
    *,
    pool: Pool = "",
    selected: Selection,
    prompt: Prompt,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Show the tokens of each block (wide, JSON, YAML).")
    ] = False,
    limit: Limit = 0,
) -> None:
    """List blocks in use or cached. With any filter, only blocks in the index are listed."""
    left = _Limit(limit)
    chosen = selected.filter(prefix=prompt.prefix(session, selected.salt, selected.adapter, ""))

    def listed(shard: Shard) -> pb.ListBlocksResponse:
        request, whole = pb.ListBlocksRequest(include_token_ids=token_ids), pb.ListBlocksResponse()
        if chosen.ByteSize():
            request.filter.CopyFrom(chosen)
        left.add_pools(whole, shard, pool, shard.admin.stub.ListBlocks, request, "blocks")
        return whole

    found = session.ask(listed, pool=pool)
    session.show_list(found, tables.BLOCKS, lambda answer: answer.blocks, "blocks")


@verb(app, "leases", "kvctl leases --holder rule/acme", lists=True)
def leases(
    session: Session,
    pool: Pool = "",
    holder: Annotated[str, typer.Option(help='Of this holder: "rule/NAME", "session/ID" and so on.')] = "",
    limit: Limit = 0,
) -> None:
    """List the leases that are held now."""
    left = _Limit(limit)

    def listed(shard: Shard) -> pb.ListLeasesResponse:
        request, whole = pb.ListLeasesRequest(holder=holder), pb.ListLeasesResponse()
        left.add_pools(whole, shard, pool, shard.admin.stub.ListLeases, request, "leases")
        return whole

    found = session.ask(listed, pool=pool)
    session.show_list(found, tables.LEASES, lambda answer: answer.leases, "leases")


@verb(app, "holds", "kvctl holds --owner ops", lists=True)
def holds(session: Session, owner: Annotated[str, typer.Option(help="Of this owner.")] = "", limit: Limit = 0) -> None:
    """List pins, and holds of ended sequences. `kvctl unpin` ends a pin or a hold."""
    left = _Limit(limit)

    def listed(shard: Shard) -> pb.ListHoldsResponse:
        whole = pb.ListHoldsResponse()
        left.add(whole, shard.admin, shard.admin.stub.ListHolds, pb.ListHoldsRequest(owner=owner), "holds")
        return whole

    found = session.ask(listed)
    session.show_list(found, tables.HOLDS, lambda answer: answer.holds, "holds")


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
    """Say where a prompt's blocks are, and why the first missing block is missing."""
    prefix = prompt.prefix(session, salt, adapter, executor)
    if (prefix is None) == (not sequence):
        raise typer.BadParameter("name a prompt or a sequence", param_hint="--tokens")
    request = pb.ExplainPrefixRequest(prefix=prefix, group=group)
    if sequence:
        request.sequence_id = sequence
    found = session.ask(
        lambda shard: shard.admin.call(shard.admin.stub.ExplainPrefix, request), executor=executor
    ).leave_out_missing()
    session.show_all(
        found,
        lambda wide: found.paragraphs(lambda answer, shard: tables.explanations(answer, wide=wide, shard=shard)),
    )


@verb(app, "preview", "kvctl preview --tokens 1,2,3 --max-new-tokens 200")
def preview(
    session: Session,
    *,
    prompt: Prompt,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens that the request may generate.")] = 0,
    salt: Salt = None,
    adapter: Adapter = None,
    tenant: Annotated[str | None, typer.Option(help="As a request of this tenant.")] = None,
    session_id: Annotated[str | None, typer.Option("--session", help="As a request of this session.")] = None,
    executor: Executor = "",
) -> None:
    """Say whether a request with this prompt would be admitted now, and how many blocks it needs. Changes nothing."""
    token_ids = required(prompt.token_ids(session))
    admission = pb.AdmitSequenceRequest(
        # No sequence gets this name.
        sequence_id="preview",
        token_ids=token_ids,
        salt=salt,
        adapter_id=adapter,
        tenant_id=tenant,
        session_id=session_id,
    )

    def previewed(shard: Shard) -> dict[str, pb.PreviewAdmissionResponse]:
        names = [executor] if executor else sorted({pool.pool_id.rpartition("/")[0] for pool in shard.pools()})
        answers = {}
        for admission.executor_id in names:
            request = pb.PreviewAdmissionRequest(admission=admission, max_new_tokens=max_new_tokens)
            answers[admission.executor_id] = shard.admin.call(shard.admin.stub.PreviewAdmission, request)
        return answers

    found = session.ask(previewed, executor=executor).leave_out_missing()
    session.show_all(
        found,
        lambda wide: found.paragraphs(
            lambda answer, shard: tables.previews(answer, len(token_ids), wide=wide, shard=shard)
        ),
    )


@verb(app, "describe", "kvctl describe pool executor-0/0")
def describe(
    session: Session,
    kind: Annotated[str, typer.Argument(help="pool, sequence, rule or hold; by default the whole stack.")] = "",
    name: Annotated[str, typer.Argument(help="Its name, as the listing of this kind shows it.")] = "",
) -> None:
    """Show all about a pool, sequence, rule or hold, or the whole stack. As YAML, or JSON."""
    if kind and not name:
        raise typer.BadParameter(f"name the {kind}", param_hint="NAME")
    if not kind:
        data = _stack(session)
        session.show(data, lambda _wide: as_yaml(data))
        return
    if kind not in ("pool", "sequence", "rule", "hold"):
        raise typer.BadParameter(f"{kind!r} is none of pool, sequence, rule, hold", param_hint="KIND")
    found = session.ask(
        lambda shard: _described(shard, kind, name), pool=name if kind == "pool" else ""
    ).leave_out_missing()
    if found.several and len(found.by_shard) == 1 and not found.failures:
        # If only one shard has the thing, only this shard's name is added.
        [(address, only)] = found.by_shard.items()
        session.show({"shard": address, kind: only}, lambda _wide: as_yaml({"shard": address, kind: only}))
        return
    session.show_all(found, lambda _wide: as_yaml(found.data(lambda answer: answer)))


def _described(shard: Shard, kind: str, name: str) -> Any:
    """All about a thing. Raises CommandError."""
    admin, stub = shard.admin, shard.admin.stub
    match kind:
        case "pool":
            return {
                "pool": admin.call(stub.GetPool, pb.GetPoolRequest(pool_id=name)).pool,
                "stats": admin.call(stub.GetStats, pb.GetStatsRequest(pool_id=name)),
            }
        case "sequence":
            listed = admin.all_pages(stub.ListSequences, pb.ListSequencesRequest(), "sequences").sequences
            return named(kind, name, ((item.sequence_id, item) for item in listed))
        case "rule":
            return admin.call(stub.GetRetentionRule, pb.GetRetentionRuleRequest(name=name)).rule
        case _:
            return named(kind, name, ((item.name, item) for item in shard.holds().holds))


@verb(app, "state", "kvctl state --hash")
def state(
    session: Session, only_hash: Annotated[bool, typer.Option("--hash", help="Show only the state's hash.")] = False
) -> None:
    """Show the cache manager's state, or its hash. Lines of JSON, without token ids."""

    def dumped(shard: Shard) -> pb.DumpStateResponse:
        whole = pb.DumpStateResponse()
        stub = shard.admin.stub
        for part in shard.admin.messages(stub.DumpState, pb.DumpStateRequest(), session.timeout, ends=False):
            whole.MergeFrom(part)
        if only_hash:
            whole.ClearField("lines")
        return whole

    # As text, the lines are the state of a single manager.
    found = (
        session.ask(dumped)
        if only_hash or session.output in (Format.JSON, Format.YAML)
        else ask([session.shard], dumped)
    )
    session.show_all(
        found, lambda _wide: found.lines(lambda one: one.state_hash if only_hash else "\n".join(one.lines))
    )


@verb(app, "fsck", "kvctl fsck")
def fsck(
    session: Session,
    pool: Pool = "",
    store: Annotated[bool, typer.Option("--store/--no-store", help="Compare with Redis, too.")] = True,
) -> None:
    """Recount all blocks and compare them with Redis. Exits with 1 for a contradiction, or without Redis."""
    request = pb.CheckPoolRequest(pool_id=pool, compare_with_store=store)
    found = session.ask(lambda shard: shard.admin.call(shard.admin.stub.CheckPool, request), pool=pool)

    def shown(wide: bool) -> str:
        counted = found.listing(tables.POOLS, lambda answer: answer.pools, wide=wide)
        return f"{counted}\n{found.lines(lambda answer: tables.check(answer, store=store))}"

    session.show_all(found, shown)
    if any(answer.violations or answer.store_compared != store for answer in found.by_shard.values()):
        raise typer.Exit(Status.FOUND)


def _stack(session: Session) -> dict[str, Any]:
    scheduler = session.scheduler

    def steered(shard: Shard) -> dict[str, Any]:
        return {
            "pools": shard.pools(),
            "rules": list(shard.rules().rules),
            "quotas": list(shard.quotas().quotas),
            "holds": list(shard.holds().holds),
        }

    data: dict[str, Any] = {
        "model": scheduler.call(scheduler.stub.GetModel, generation_pb2.GetModelRequest()),
        "loads": scheduler.call(scheduler.stub.GetLoads, generation_pb2.GetLoadsRequest()),
    }
    if session.router_address:
        data["engines"] = list(session.engines.engines)
    found = session.ask(steered)
    found.check()
    whole: Any = found.data(lambda answer: answer)
    data |= whole
    return data


class _Limit:
    """How many items a listing over pools and shards may still have; 0 for any number."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0

    def add(self, whole: Any, admin: Remote[Any], method: Callable[..., Any], request: Any, items: str) -> None:
        """Adds a listing to an answer. items: the name of the field in both. Raises CommandError."""
        if self._limit and self._taken >= self._limit:
            return
        found = admin.all_pages(method, request, items, self._limit and self._limit - self._taken)
        self._taken += len(getattr(found, items))
        whole.MergeFrom(found)

    def add_pools(
        self, whole: Any, shard: Shard, pool: str, method: Callable[..., Any], request: Any, items: str
    ) -> None:
        """The same for the listing of a pool, or without a pool for the listings of all pools of a shard."""
        for pool_id in [pool] if pool else [item.pool_id for item in shard.pools()]:
            request.pool_id, request.page_token = pool_id, ""
            self.add(whole, shard.admin, method, request, items)
