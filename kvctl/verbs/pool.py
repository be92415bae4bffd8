"""`kvctl pool`: shares of memory."""

from typing import Annotated, NamedTuple

import typer
from google.protobuf.field_mask_pb2 import FieldMask

from kvctl.display.output import number
from kvctl.display.tables import counts
from kvctl.options import DryRun, Yes
from kvctl.session import Session, ask_confirmed, verb
from kvctl.shards import Shard
from protos.kvcache.v1 import kvcache_pb2 as pb

app = typer.Typer(help="Set how many blocks a pool may use.")


@verb(app, "set", "kvctl pool set executor-0/0 --blocks 128")
def set_pool(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="POOL", help="As `kvctl pools` names it.")],
    blocks: Annotated[int, typer.Option(min=1, help="Device blocks that the pool may use.")],
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Set how many device blocks a pool may use. Asks before cached blocks leave the device or pins become leases.

    Only free blocks move, empty blocks first. Cached blocks are offloaded to a lower tier, or dropped if the tier has
    no room.
    """
    tried: dict[str, _Resized] = {}

    def resize(shard: Shard, dry_run: bool) -> _Resized:
        # The etag makes the call fail if another operator has changed the pool in between.
        before = tried[shard.address].before if shard.address in tried else _pool(shard, name)
        request = pb.UpdatePoolRequest(
            pool=pb.Pool(pool_id=name, total_blocks=blocks, etag=before.etag),
            update_mask=FieldMask(paths=["total_blocks"]),
            validate_only=dry_run,
        )
        tried[shard.address] = _Resized(before, shard.admin.call(shard.admin.stub.UpdatePool, request))
        return tried[shard.address]

    def question(one: _Resized) -> str:
        lost = [f"take {left}"] if (left := _left(one.answer)) else []
        lost += [f"make the pin {pin} a lease" for pin in one.answer.degraded_hold_names]
        change = f"Set pool {name} from {one.before.total_blocks} to {blocks} blocks"
        return f"{', '.join([change, *lost])}?" if lost else ""

    def said(one: _Resized) -> str:
        done, took = ("would set", "would take") if dry_run else ("set", "took")
        lines = [f"{done} pool {name} from {one.before.total_blocks} to {blocks} blocks"]
        lines += [f"{took} {left}"] if (left := _left(one.answer)) else []
        return "\n".join([*lines, *(f"degraded to a lease: {pin}" for pin in one.answer.degraded_hold_names)])

    found = ask_confirmed(session, resize, question, dry_run=dry_run, yes=yes, pool=name)
    session.show_all(found, lambda _wide: found.lines(said), lambda one: one.answer)


class _Resized(NamedTuple):
    """A pool before a change, and the answer to the change."""

    before: pb.Pool
    answer: pb.UpdatePoolResponse


def _pool(shard: Shard, name: str) -> pb.Pool:
    return shard.admin.call(shard.admin.stub.GetPool, pb.GetPoolRequest(pool_id=name)).pool


def _left(answer: pb.UpdatePoolResponse) -> str:
    """The cached blocks that leave the device, in words; empty for none."""
    on_device = sum(item.num_blocks for item in answer.dropped if item.tier == pb.TIER_DEVICE)
    if not (count := answer.offloaded_blocks + on_device):
        return ""
    parts = [f"{answer.offloaded_blocks} offloaded"] if answer.offloaded_blocks else []
    parts += [f"dropped: {counts(answer.dropped)}"] if answer.dropped else []
    return f"{number(count, 'cached block')} off the device ({'; '.join(parts)})"
