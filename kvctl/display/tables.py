"""Tables and lines of each kind of message."""

from collections.abc import Mapping, Sequence

from kvctl.display.output import Column, key, lasting, number, optional, printable, share, size, span, table, word
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.durations import seconds


def _tier(number: pb.Tier) -> str:
    return word(pb.Tier.Name(number))


def _lower(pool: pb.Pool, tier: pb.Tier) -> str:
    """Filled of all slots of a tier, and how many of them hold copies of device blocks: 91/91 (90 copies)."""
    found = next((item for item in pool.lower_tiers if item.tier == tier), None)
    if found is None:
        return "-"
    filled = found.used_blocks + found.cached_blocks + found.copy_blocks
    copies = f" ({found.copy_blocks} {'copy' if found.copy_blocks == 1 else 'copies'})" if found.copy_blocks else ""
    return f"{filled}/{found.total_blocks}{copies}"


def _empty(pool: pb.Pool) -> int:
    """Blocks that hold nothing. While a pool is made smaller, more than its total may be in use."""
    return max(0, pool.total_blocks - pool.used_blocks - pool.cached_blocks)


POOLS: Sequence[Column[pb.Pool]] = (
    Column("POOL", lambda pool: pool.pool_id),
    Column("BLOCKS", lambda pool: pool.total_blocks),
    Column("USED", lambda pool: pool.used_blocks),
    Column("CACHED", lambda pool: pool.cached_blocks),
    Column("EMPTY", _empty),
    Column("EVICTED", lambda pool: pool.evicted_blocks),
    Column("HIT", lambda pool: share(pool.hit_tokens, pool.queried_tokens)),
    Column("HOST", lambda pool: _lower(pool, pb.TIER_HOST)),
    Column("DISK", lambda pool: _lower(pool, pb.TIER_DISK)),
    Column("TOKENS/BLOCK", lambda pool: pool.block_size, wide=True),
    Column("BYTES/BLOCK", lambda pool: size(pool.spec.block_bytes), wide=True),
    Column("DTYPE", lambda pool: pool.spec.dtype, wide=True),
    Column("LAYERS", lambda pool: pool.spec.num_layers, wide=True),
    Column("KV-HEADS", lambda pool: pool.spec.num_kv_heads, wide=True),
    Column("WINDOW", lambda pool: optional(pool.spec, "attention_window"), wide=True),
    Column("QUERIED", lambda pool: pool.queried_tokens, wide=True),
)

SEQUENCES: Sequence[Column[pb.Sequence]] = (
    Column("SEQUENCE", lambda item: item.sequence_id),
    Column("EXECUTOR", lambda item: item.executor_id),
    Column("TOKENS", lambda item: item.num_tokens),
    Column("COMPUTED", lambda item: item.computed_tokens),
    Column("CACHED", lambda item: item.cached_tokens),
    Column("BLOCKS", lambda item: item.num_blocks),
    Column("SALT", lambda item: optional(item, "salt")),
    Column("TENANT", lambda item: optional(item, "tenant_id")),
    Column("SESSION", lambda item: optional(item, "session_id"), wide=True),
    Column("SCHEDULER", lambda item: item.scheduler_id, wide=True),
    Column("HANDLE", lambda item: item.sequence_handle, wide=True),
    Column("CAPACITY", lambda item: item.capacity_tokens, wide=True),
    Column("EVICTS", lambda item: _policy(item), wide=True),
    Column("WINDOW", lambda item: optional(item, "window_tokens"), wide=True),
    Column("GRANTED", lambda item: item.granted_blocks, wide=True),
)


def _policy(sequence: pb.Sequence) -> str:
    if not sequence.HasField("eviction_policy"):
        return ""
    return common.EvictionKind.Name(sequence.eviction_policy.kind).removeprefix("EVICTION_KIND_").lower()


BLOCKS: Sequence[Column[pb.Block]] = (
    Column("POOL", lambda block: block.pool_id),
    Column("TIER", lambda block: _tier(block.tier)),
    Column("SLOT", lambda block: block.slot),
    Column("KEY", lambda block: key(block.key), name=lambda block: block.key.hex()),
    Column("TOKENS", lambda block: block.num_tokens),
    Column("REFS", lambda block: block.references),
    Column("PRIORITY", lambda block: block.retention_priority),
    Column("DEPTH", lambda block: block.depth),
    Column("SALT", lambda block: optional(block, "salt")),
    Column("PARENT", lambda block: key(block.parent_key), wide=True),
    Column("ADAPTER", lambda block: optional(block, "adapter_id"), wide=True),
    Column("TENANT", lambda block: optional(block, "tenant_id"), wide=True),
    Column("SESSION", lambda block: optional(block, "session_id"), wide=True),
    Column("TOKEN-IDS", lambda block: ",".join(map(str, block.token_ids)), wide=True),
)

PREFIXES: Sequence[Column[pb.CachedPrefix]] = (
    Column("POOL", lambda item: item.last_block.pool_id),
    Column("KEY", lambda item: key(item.last_block.key), name=lambda item: item.last_block.key.hex()),
    Column("TOKENS", lambda item: item.num_tokens),
    Column("BLOCKS", lambda item: counts(item.blocks)),
    Column("PRIORITY", lambda item: item.min_retention_priority),
    Column("SALT", lambda item: optional(item.last_block, "salt")),
    Column("ADAPTER", lambda item: optional(item.last_block, "adapter_id"), wide=True),
    Column("TENANT", lambda item: optional(item.last_block, "tenant_id"), wide=True),
    Column("SESSION", lambda item: optional(item.last_block, "session_id"), wide=True),
)

LEASES: Sequence[Column[pb.BlockLease]] = (
    Column("HOLDER", lambda item: item.lease.holder),
    Column("PRIORITY", lambda item: item.lease.retention_priority),
    Column("LEFT", lambda item: lasting(item.lease, "remaining_duration")),
    Column("POOL", lambda item: item.block.pool_id),
    Column("TIER", lambda item: _tier(item.block.tier)),
    Column("SLOT", lambda item: item.block.slot),
    Column("KEY", lambda item: key(item.block.key)),
    Column("SALT", lambda item: optional(item.block, "salt")),
)

HOLDS: Sequence[Column[pb.Hold]] = (
    Column("NAME", lambda hold: hold.name),
    Column("KIND", lambda hold: "pin" if hold.pin else "hold"),
    Column("OWNER", lambda hold: hold.owner),
    Column("LEFT", lambda hold: lasting(hold, "remaining_duration")),
    Column("BLOCKS", lambda hold: hold.num_blocks),
    Column("EXECUTOR", lambda hold: hold.executor_id),
)


def account(of: pb.Quota | pb.DeleteQuotaRequest) -> str:
    """The account in words: "tenant acme" or "salt acme"."""
    if of.HasField("tenant_id"):
        return f"tenant {printable(of.tenant_id)}"
    return f"salt {printable(of.salt)}"


QUOTAS: Sequence[Column[pb.QuotaUsage]] = (
    Column("ACCOUNT", lambda item: account(item.quota)),
    Column("POOL", lambda item: item.pool_id),
    Column("DEVICE", lambda item: item.device_blocks),
    Column("FLOOR", lambda item: item.quota.device_floor_blocks),
    Column("CEILING", lambda item: optional(item.quota, "device_ceiling_blocks")),
    Column("HOST", lambda item: item.host_blocks),
    Column("HOST-FLOOR", lambda item: item.quota.host_floor_blocks),
    Column("HOST-CEILING", lambda item: optional(item.quota, "host_ceiling_blocks")),
)

_EXPLAINED: Sequence[Column[pb.ExplainedBlock]] = (
    Column("DEPTH", lambda item: item.block.depth),
    Column("TIER", lambda item: _tier(item.block.tier)),
    Column("SLOT", lambda item: item.block.slot),
    Column("KEY", lambda item: key(item.block.key)),
    Column("REFS", lambda item: item.block.references),
    Column("PRIORITY", lambda item: item.block.retention_priority),
    Column("LAST-HIT", lambda item: lasting(item, "last_hit_age")),
    Column("LEASES", lambda item: ", ".join(lease.holder for lease in item.leases)),
)


def counts(tiers: Sequence[pb.TierCount]) -> str:
    """Blocks per tier: 3 device, 1 host."""
    return ", ".join(f"{item.num_blocks} {_tier(item.tier)}" for item in tiers) or "none"


def explanations(answer: pb.ExplainPrefixResponse, *, wide: bool, shard: str = "") -> str:
    """The blocks of a prompt, executor by executor. shard: said in front of each executor."""
    parts = []
    for item in answer.explanations:
        head = _at(shard, printable(item.executor_id))
        lines = [f"{head}: {number(item.cached_tokens, 'cached token')}"]
        if item.blocks:
            lines.append(table(_EXPLAINED, item.blocks, wide=wide))
        if item.miss_reason:
            lines.append(f"the next block is missing: {_missing(item)}")
        elif not item.blocks:
            lines.append("the prompt is shorter than a block: it has no full block that could be shown")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or _at(shard, "no executor is registered")


def _at(shard: str, text: str) -> str:
    """Returns a text after its shard, if the shard is given."""
    return f"{shard}: {text}" if shard else text


def _missing(item: pb.Explanation) -> str:
    reason = pb.MissReason.Name(item.miss_reason).removeprefix("MISS_REASON_").lower().replace("_", " ")
    if not item.HasField("removal"):
        return reason
    removal = item.removal
    cause = _cause(removal.cause)
    whom = f" for {printable(removal.for_sequence_id)}" if removal.for_sequence_id else ""
    age = span(seconds(removal.age))
    return f"{reason}: {cause} {age} ago{whom}, with priority {removal.retention_priority}"


def _cause(cause: pb.RemovalCause) -> str:
    return pb.RemovalCause.Name(cause).removeprefix("REMOVAL_CAUSE_").lower().replace("_", " ")


_ESTIMATED: Sequence[Column[pb.BlockEstimate]] = (
    Column("GROUP", lambda item: item.group),
    Column("CACHED", lambda item: item.reusable_blocks),
    Column("ALLOCATED", lambda item: item.next_step_blocks),
    Column("TO-THE-END", lambda item: item.completion_blocks),
)


def previews(
    answers: Mapping[str, pb.PreviewAdmissionResponse], num_tokens: int, *, wide: bool, shard: str = ""
) -> str:
    """What an admission would find and take, executor by executor, with the blocks of each layer group.

    shard: said in front of each executor.
    """
    parts = []
    for executor_id, answer in answers.items():
        missing = number(answer.missing_blocks, "block")
        outcome = "would be admitted" if answer.admitted else f"would wait: {missing} missing"
        head = _at(shard, f"{printable(executor_id)}: {outcome}")
        lines = [f"{head}, {answer.cached_tokens} of {number(num_tokens, 'token')} cached"]
        lines.append(table(_ESTIMATED, answer.estimates, wide=wide))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or _at(shard, "no executor is registered")


def check(answer: pb.CheckPoolResponse, *, store: bool) -> str:
    """The result of a recount."""
    lines = [
        f"violation in {printable(item.pool_id or 'the store')}, slot {item.slot}: {printable(item.message)}"
        for item in answer.violations
    ]
    if store and not answer.store_compared:
        lines.append("Redis could not be read: its copy was not compared")
    elif not answer.violations:
        lines.append("clean" + (", and Redis agrees" if answer.store_compared else ""))
    return "\n".join(lines)


def event(item: pb.Event) -> str:
    """One event in a line."""
    block = item.block
    parts = [
        f"{item.event_number:>8}",
        "snapshot" if item.snapshot else "        ",
        f"{pb.EventKind.Name(item.kind).removeprefix('EVENT_KIND_').lower().replace('_', ' '):<19}",
        printable(item.executor.executor_id or block.pool_id),
    ]
    if block.key:
        parts += [_tier(block.tier), f"slot {block.slot}", key(block.key), f"priority {block.retention_priority}"]
    if block.HasField("salt"):
        parts.append(f"salt {printable(block.salt)}")
    if item.HasField("lease"):
        parts.append(f"{printable(item.lease.holder)} at {item.lease.retention_priority}")
    if item.removal_cause:
        parts.append(_cause(item.removal_cause))
    if item.for_sequence_id:
        parts.append(f"for {printable(item.for_sequence_id)}")
    return "  ".join(parts)
