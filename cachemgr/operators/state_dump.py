"""The whole state of a manager as lines of JSON, without token ids. Equal histories give equal lines."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cachemgr.retention.leases import leases_of
from protos.kvcommon.tokens import pack, packed_bytes

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.blocks.offload import WriteThrough
    from cachemgr.sequences.clients import Executor, Scheduler
    from cachemgr.sequences.copies import Ticket
    from cachemgr.sequences.sequence import GroupTable, Sequence
    from cachemgr.sequences.token_eviction_state import TokenEvictionState
    from cachemgr.types import RetentionRule


# Made once, since there is a line for each block.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def state_hash(lines: Iterable[str]) -> str:
    """The SHA-256 of the lines of a state."""
    digest = sha256()
    for state_line in lines:
        digest.update(hashed(state_line))
    return digest.hexdigest()


def hashed(state_line: str) -> bytes:
    """A line's contribution to the hash of a state."""
    return state_line.encode() + b"\n"


def line(kind: str, **facts: Any) -> str:
    """Encodes one line of a state."""
    return _encode({"kind": kind, **facts})


def scheduler_state(scheduler: Scheduler) -> str:
    return line(
        "scheduler",
        id=scheduler.scheduler_id,
        epoch=scheduler.epoch,
        deadline=scheduler.deadline,
        sync_number=scheduler.sync_number,
        executors=sorted(scheduler.executors),
        void=sorted(scheduler.void),
    )


def rule_state(spec: RetentionRule) -> str:
    """The line of a rule, with only a digest of its tokens."""
    facts = asdict(spec)
    prefix = facts["match"].pop("prefix_token_ids")
    requested = spec.action.eviction_policy
    facts["action"]["eviction_policy"] = None if requested is None else requested.encoded.hex()
    return line("rule", prefix=sha256(packed_bytes(pack(prefix))).hexdigest(), **facts)


def executor_state(executor: Executor) -> Iterator[str | Iterator[str]]:
    """Yields the lines of an executor, its pools, sequences, copies and holds; an iterator for each pool's blocks."""
    yield line(
        "executor",
        id=executor.executor_id,
        epoch=executor.epoch,
        deadline=executor.deadline,
        model_fingerprint=executor.spec.model_fingerprint.hex(),
        block_size=executor.block_size,
        plain_rotary=executor.spec.plain_rotary,
        weight_version=executor.spec.weight_version,
    )
    for pool in executor.pools:
        yield from _pool(pool)
    for sequence in executor.sequences.values():
        yield _sequence(sequence)
    for ticket in sorted(executor.tickets.values(), key=lambda ticket: ticket.number):
        yield _ticket(ticket)
    for hold in executor.holds:
        blocks = [[pool.spec.group, block.index] for pool, block in hold.blocks]
        yield line("hold", name=hold.name, pin=hold.pin, blocks=blocks, owners=hold.owners)


def _numbers(numbers: Iterable[int]) -> list[int | str]:
    """The count of the numbers and a digest of them in order, since there may be millions."""
    packed = array("Q", numbers)
    return [len(packed), sha256(packed.tobytes()).hexdigest()]


def _pool(pool: BlockPool) -> Iterator[str | Iterator[str]]:
    yield line(
        "pool",
        id=pool.pool_id,
        tokens=pool.tokens.total,
        lru_clock=pool.lru_clock,
        offloading=sorted(block.index for block in pool.offloader.offloading),
        draining=sorted(
            [block.index, ticket.number] for block, ticket in pool.offloader.draining.items() if block is not None
        ),
        zero_on_free=sorted(block.index for block in pool.zero_on_free),
        **_write_through(pool.write_through),
        share_number=pool.share_number,
        leases=[pool.honoured_leases, pool.broken_leases],
        tombstones=sorted(key.hex() for key in pool.tree.tombstones),
        pending=sorted([key.hex(), block.index] for key, block in pool.pending.items()),
    )
    for tier in pool.tiers:
        counters = {name: value for name, value in asdict(tier.counters).items() if not name.startswith("_")}
        owned = sorted(tier.accounts.shares.items(), key=lambda item: item[0].key)
        shares = [[asdict(account.quota), share.count, share.used] for account, share in owned]
        yield line(
            "tier",
            pool=pool.pool_id,
            tier=tier.kind.name,
            used=tier.used,
            cached=tier.cached,
            empty=_numbers(tier.all_empty()),
            withheld=_numbers(tier.withheld),
            to_withhold=tier.to_withhold,
            shares=shares,
            **counters,
        )
    yield (_block(pool, block) for block in pool.blocks if block is not None)


def _write_through(write_through: WriteThrough) -> dict[str, Any]:
    tier = write_through.tier
    numbers = (
        number
        for block, index in write_through.copies.items()
        if tier is not None
        for number in (block.index, index, tier.generation(index))
    )
    return {
        # In order of creation.
        "write_through_copies": [len(write_through.copies), _numbers(numbers)[1]],
        "write_through_open": [[block.index, ticket.number] for block, ticket in write_through.open.items()],
        "write_through_running": write_through.running,
        "write_through_queue": _numbers(block.index for block in write_through.queue),
        "write_through_successors": [
            [below.index, successor.index] for below, successor in write_through.successors.items()
        ],
    }


def _block(pool: BlockPool, block: Block) -> str:
    scope = block.scope
    return line(
        "block",
        pool=pool.pool_id,
        slot=block.index,
        key="" if block.parent is None else block.key.hex(),
        parent=None if block.parent is None else block.parent.key.hex(),
        depth=0 if block.parent is None else block.depth,
        salt=None if scope is None else scope.salt,
        adapter_id=None if scope is None else scope.adapter_id,
        tenant_id=None if scope is None else scope.tenant_id,
        session_id=None if scope is None else scope.session_id,
        extra="" if scope is None else scope.extra.hex(),
        weight_version="" if scope is None else scope.weight_version,
        tokens=0 if block.parent is None else len(block.tokens) // 4,
        references=block.refs,
        priority=block.priority,
        recency=block.recency,
        evictable=block.lru_prev is not None,
        stored_step=block.stored_step,
        generation=pool.tier_of(block).generation(block.index),
        writer=None if block.writer is None else block.writer.handle,
        leases=[[*lease.request, lease.deadline] for lease in leases_of(block)],
    )


def _sequence(sequence: Sequence) -> str:
    return line(
        "sequence",
        id=sequence.sequence_id,
        handle=sequence.handle,
        scheduler=sequence.scheduler.scheduler_id,
        tokens=len(sequence.tokens),
        content=sha256(sequence.packed(0, len(sequence.tokens))).hexdigest(),
        computed=sequence.computed,
        cached=sequence.cached_tokens,
        step=sequence.step,
        void=sequence.void,
        no_store=sequence.no_store,
        forgotten=sequence.forgotten,
        salt=sequence.scope.salt,
        adapter_id=sequence.scope.adapter_id,
        tenant_id=sequence.scope.tenant_id,
        session_id=sequence.scope.session_id,
        weight_version=sequence.scope.weight_version,
        extra_keys=[[extra.start, extra.length, extra.digest.hex()] for extra in sequence.extra_keys],
        retention=sequence.retention.state(),
        opened=[ticket.number for ticket in sequence.opened],
        tables=[_table(table) for table in sequence.tables],
        waits_on=sorted(writer.handle for writer in sequence.waits_on),
        holds=sequence.holds,
        eviction=None if sequence.eviction is None else _eviction(sequence.eviction),
    )


def _eviction(eviction: TokenEvictionState) -> dict[str, Any]:
    return {
        "policy": asdict(eviction.policy),
        "prompt": eviction.prompt,
        "granted": eviction.granted,
        "private": [block.index for block in eviction.private],
        "begun": eviction.has_begun,
        "committed": eviction.committed,
        "evicted": eviction.evicted,
    }


def _table(table: GroupTable) -> dict[str, Any]:
    return {
        "slots": table.slots().slots,
        "committed": table.committed,
        "window_start": table.window_start,
        "duplicate_refs": {index: block.index for index, block in sorted(table.duplicate_refs.items())},
    }


def _ticket(ticket: Ticket) -> str:
    return line(
        "ticket",
        number=ticket.number,
        group=ticket.pool.spec.group,
        purpose=ticket.purpose.value,
        source=None if ticket.source is None else ticket.source.index,
        target=ticket.target.index,
        tokens=ticket.num_tokens,
        sequence=None if ticket.sequence is None else ticket.sequence.handle,
        held_ancestors=[block.index for block in ticket.held_ancestors],
    )
