"""`kvctl pool`: shares of memory."""

from typing import Annotated, NamedTuple

import typer
from google.protobuf.field_mask_pb2 import FieldMask

from kvctl.options import DryRun
from kvctl.session import Session, verb
from kvctl.shards import Shard
from protos.kvcache.v1 import kvcache_pb2 as pb

app = typer.Typer(help="Set how many blocks a pool may use.")


@verb(app, "set", "kvctl pool set executor-0/0 --blocks 128")
def set_pool(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="POOL", help="As `kvctl pools` names it.")],
    blocks: Annotated[int, typer.Option(min=1, help="Device blocks that it may use.")],
    dry_run: DryRun = False,
) -> None:
    """Set how many device blocks a pool may use; only free blocks move, and cached ones are offloaded."""

    def resize(shard: Shard) -> _Resized:
        pool = shard.admin.call(shard.admin.stub.GetPool, pb.GetPoolRequest(pool_id=name)).pool
        # The etag: a change of another operator in between is not undone unseen.
        request = pb.UpdatePoolRequest(
            pool=pb.Pool(pool_id=name, total_blocks=blocks, etag=pool.etag),
            update_mask=FieldMask(paths=["total_blocks"]),
            validate_only=dry_run,
        )
        return _Resized(pool.total_blocks, shard.admin.call(shard.admin.stub.UpdatePool, request))

    found = session.ask(resize, pool=name)
    done = "would set" if dry_run else "set"

    def said(one: _Resized) -> str:
        lines = [f"{done} pool {name} from {one.before} to {blocks} blocks"]
        return "\n".join([*lines, *(f"degraded for it: {pin}" for pin in one.answer.degraded_hold_names)])

    session.show_all(found, lambda _wide: found.lines(said), lambda one: one.answer)


class _Resized(NamedTuple):
    """A pool's blocks before a change, and the answer to the change."""

    before: int
    answer: pb.UpdatePoolResponse
