"""Admissions: checking a request, then matching, claiming and allocating blocks for it in one go."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from hashlib import sha256

from cachemgr.blocks.block import Account, Block, account_of
from cachemgr.blocks.block_pool import BlockPool
from cachemgr.errors import SequenceTooLongError
from cachemgr.retention.bounds import check_retention
from cachemgr.retention.priority import REQUEST, SESSION
from cachemgr.retention.rule_book import RuleBook
from cachemgr.retention.sequence_retention import SequenceRetention
from cachemgr.sequences import prefix_match
from cachemgr.sequences.clients import Executor, Scheduler
from cachemgr.sequences.commit import publish_pending
from cachemgr.sequences.miss import first_miss
from cachemgr.sequences.prefix_match import Match, Partial
from cachemgr.sequences.sequence import GroupTable, Sequence
from cachemgr.sequences.token_eviction import resolve
from cachemgr.sequences.token_eviction_state import TokenEvictionState, blocks_for
from cachemgr.sequences.transfers import onload
from cachemgr.types import Admission, AdmitRequest, ManagerConfig, Miss, Receipt, TierKind
from cachemgr.validation import check_extra_keys, check_id, check_tokens
from protos.errors import InvalidField
from protos.kvcommon.tokens import packed_bytes

# The limit on `max_continuation_tokens`.
MAX_CONTINUATION = 65536


def check_request(request: AdmitRequest) -> array[int]:
    """Returns the packed tokens. Raises InvalidField for errors that can be found without the state."""
    check_id("sequence_id", request.sequence_id)
    tokens = check_tokens("token_ids", request.token_ids)
    if request.adapter_id is not None and not 0 <= request.adapter_id < 1 << 64:
        raise InvalidField("adapter_id", "must fit into 64 bits")
    for field in ("salt", "session_id", "request_id", "tenant_id"):
        value = getattr(request, field)
        if value is not None:
            check_id(field, value)
    prompt = request.num_prompt_tokens
    if prompt is not None and not 1 <= prompt <= len(request.token_ids):
        raise InvalidField("num_prompt_tokens", f"must be from 1 to the {len(request.token_ids)} tokens known")
    check_retention(request.retention)
    check_extra_keys("extra_keys", request.extra_keys, len(request.token_ids))
    if not 0 <= request.max_continuation <= MAX_CONTINUATION:
        raise InvalidField("max_continuation_tokens", f"must be at most {MAX_CONTINUATION}")
    if request.store_tokens is not None and request.store_tokens < 0:
        raise InvalidField("store_tokens", "must not be negative")
    return tokens


def content(request: AdmitRequest, tokens: array[int]) -> object:
    """The content of a request; repeated admissions of one id must have equal content."""
    return (
        request.executor_id,
        sha256(packed_bytes(tokens)).digest(),
        request.salt,
        request.adapter_id,
        holder(request),
        request.num_prompt_tokens,
        request.retention,
        request.tenant_id,
        request.extra_keys,
        None if request.hints is None else json.dumps(asdict(request.hints), sort_keys=True),
        request.eviction_policy,
        request.no_read,
        request.no_store,
        request.lowest_tier,
        request.store_tokens,
    )


def holder(request: AdmitRequest) -> str:
    """The holder of the request's leases."""
    if request.session_id is not None:
        return SESSION + request.session_id
    return REQUEST + (request.request_id or request.sequence_id)


def watermark(pool: BlockPool, config: ManagerConfig) -> int:
    """Number of blocks of a pool that admissions leave free for running sequences."""
    return int(pool.device.total * config.free_watermark)


def check_length(executor: Executor, tokens: int, field: str) -> None:
    """Raises SequenceTooLongError if N = `tokens` tokens can never fit."""
    blocks = _least_blocks(executor)
    if blocks_for(tokens, executor.block_size) > blocks:
        text = f"{tokens} tokens do not fit into {blocks} blocks of {executor.block_size}"
        raise SequenceTooLongError(text, fields={field: f"must be at most {blocks * executor.block_size} tokens"})


def _least_blocks(executor: Executor) -> int:
    return min(pool.device.total for pool in executor.pools)


def _check_size(sequence: Sequence, max_new_tokens: int = 0) -> None:
    """Raises SequenceTooLongError if a new sequence can never have all blocks that it needs at once."""
    executor, known, eviction = sequence.executor, len(sequence.tokens), sequence.eviction
    if eviction is None:
        check_length(executor, known, "token_ids")
        check_length(executor, known + max_new_tokens, "max_new_tokens")
        return
    check_length(executor, eviction.usable(known), "token_ids")
    blocks = _least_blocks(executor)
    for tokens, field in ((eviction.past_first(known), "eviction_policy"), (known + max_new_tokens, "max_new_tokens")):
        peak = sequence.peak_blocks(tokens)
        if peak > blocks:
            text = f"to evict tokens, the sequence needs {peak} blocks at once, the pool has {blocks}"
            raise SequenceTooLongError(text, fields={field: f"needs {peak} blocks, more than the {blocks} of the pool"})


def _lowest_tier(request: AdmitRequest, sequence: Sequence) -> TierKind | None:
    """The lowest tier whose blocks a sequence may use; None if it may use no cached block.

    It may use none if its pools have no room for a second table to evict tokens into.
    """
    eviction = sequence.eviction
    if request.no_read:
        return None
    if eviction is not None:
        past = eviction.past_first(len(sequence.tokens))
        if eviction.peak_blocks(past, sequence.block_size, no_store=False) > _least_blocks(sequence.executor):
            return None
    return request.lowest_tier


def _stored_tokens(sequence: Sequence, prompt: int) -> int:
    """Number of leading tokens of a prompt whose blocks stay in the cache."""
    size, eviction, limit = sequence.block_size, sequence.eviction, sequence.store_limit
    if sequence.no_store:
        return 0
    if eviction is not None:
        prompt = eviction.policy.clean_tokens(prompt, eviction.prompt)
    if limit is not None and limit < prompt:
        return limit // size * size
    return prompt if sequence.executor.stores_partial else prompt // size * size


def _continuation(request: AdmitRequest, sequence: Sequence) -> tuple[int, ...]:
    """Cached tokens after the sequence's own, if it may read them."""
    if request.no_read or request.extra_keys or sequence.eviction is not None:
        return ()
    return prefix_match.find_continuation(sequence, request.max_continuation)


class GroupPlan:
    """The blocks that an admission uses in one group: matched blocks of all tiers, and `new_blocks` empty blocks.

    `on_device` are the matched device blocks; `idle` are the device blocks without a reference.
    """

    __slots__ = ("idle", "matched", "new_blocks", "on_device", "pool")

    def __init__(self, pool: BlockPool, match: Match, group: int, needed: int) -> None:
        blocks, sources = match.blocks[group], match.sources[group : group + 1]
        self.pool = pool
        self.matched = [block for block in (*blocks, *sources) if block is not None]
        self.on_device = [block for block in self.matched if pool.is_on_device(block)]
        self.idle = [block for block in self.on_device if not block.refs]
        fetched = sum(block is not None and not pool.is_on_device(block) for block in blocks)
        self.new_blocks = needed - len(blocks) + fetched - (match.in_place and bool(sources))

    def spare(self, account: Account | None, config: ManagerConfig, *, within_ceiling: bool = True) -> int:
        """Free slots that the admission leaves above the watermark; negative if slots are missing."""
        device = self.pool.device
        free = device.free_for(account, claimed=self.idle, within_ceiling=within_ceiling)
        return free - self.new_blocks - watermark(self.pool, config)

    def check_ceiling(self, account: Account | None) -> None:
        """Raises SequenceTooLongError if a quota never allows this many slots, whatever else ends."""
        own = sum(account_of(block) is account for block in self.on_device)
        self.pool.device.accounts.check_ceiling(account, own + self.new_blocks)


class AdmissionPlan:
    """The decision about an admission: a preview reports the plan, and `claim` carries out the same plan.

    Making a plan changes nothing. Each table gets `needed` blocks for the known tokens and `ahead` more.
    `missing_blocks` counts over all groups.
    """

    __slots__ = ("ahead", "groups", "match", "missing_blocks", "needed")

    def __init__(self, sequence: Sequence, match: Match, needed: int, blocks_ahead: int, config: ManagerConfig) -> None:
        self.match = match
        self.needed = needed
        self.groups = [GroupPlan(pool, match, group, needed) for group, pool in enumerate(sequence.executor.pools)]
        spare = [group.spare(sequence.scope.account, config) for group in self.groups]
        self.missing_blocks = self._count_missing(sequence, spare, config)
        self.ahead = max(0, min(blocks_ahead, *spare))

    def missing_without_ceiling(self, sequence: Sequence, config: ManagerConfig) -> int:
        """Blocks that would be missing even without a ceiling."""
        account = sequence.scope.account
        spare = [group.spare(account, config, within_ceiling=False) for group in self.groups]
        return self._count_missing(sequence, spare, config)

    def _count_missing(self, sequence: Sequence, spare: list[int], config: ManagerConfig) -> int:
        """Counts missing blocks. A sequence that is alone on its executor may go below the watermark."""
        alone = not sequence.executor.sequences
        return sum(
            max(0, -free - (watermark(group.pool, config) if alone else 0))
            for group, free in zip(self.groups, spare, strict=True)
        )


def new_sequence(
    request: AdmitRequest,
    tokens: array[int],
    scheduler: Scheduler,
    executor: Executor,
    rules: RuleBook,
    config: ManagerConfig,
) -> Sequence:
    """Makes the sequence for a request and the rules that match it, without a number and without blocks.

    Raises InvalidField, RulePolicyError.
    """
    scope = executor.scopes.of(request.salt, request.adapter_id, request.tenant_id, request.session_id)
    matching = rules.for_request(request, tokens)
    no_store = request.no_store or any(rule.spec.action.no_store for rule in matching)
    policy = resolve(request, matching, executor)
    prompt = request.num_prompt_tokens or len(tokens)
    retention = SequenceRetention(request.retention, prompt, holder(request), matching, config)
    sequence = Sequence(
        request.sequence_id,
        0,
        scheduler,
        executor,
        tokens,
        scope,
        retention,
        no_store,
        request.extra_keys,
        request.store_tokens,
    )
    if policy is not None:
        sequence.eviction = TokenEvictionState(policy, prompt, ahead=config.capacity_ahead_tokens)
    return sequence


def plan_admission(
    request: AdmitRequest, sequence: Sequence, config: ManagerConfig, max_new_tokens: int = 0
) -> AdmissionPlan:
    """Plans the cached blocks that the sequence uses, and the blocks that it allocates; changes nothing.

    Raises SequenceTooLongError if the pool can never hold the sequence, or its quota never allows it.
    """
    _check_size(sequence, max_new_tokens)
    plan = _best_plan(sequence, _lowest_tier(request, sequence), config)
    if plan.missing_blocks:
        for group in plan.groups:
            group.check_ceiling(sequence.scope.account)
    return plan


def _best_plan(sequence: Sequence, lowest: TierKind | None, config: ManagerConfig) -> AdmissionPlan:
    needed = blocks_for(sequence.slots_for(len(sequence.tokens)), sequence.block_size)
    # Only until the first sync: full capacity ahead for each new sequence would leave no block for the next.
    ahead = _blocks_ahead(sequence, config) - needed
    if lowest is None:
        return AdmissionPlan(sequence, prefix_match.no_match(sequence), needed, ahead, config)
    ways = [Partial.TAKE_OVER, Partial.NONE] if config.partial_reuse else [Partial.NONE]
    if config.copy_on_partial_reuse:
        ways.insert(0, Partial.COPY if config.partial_reuse else Partial.EXACT)
    matcher = prefix_match.PrefixMatcher(sequence, lowest)
    for way in ways:
        # A copy needs a source and a target block. Without free blocks for both, the source itself is used.
        plan = AdmissionPlan(sequence, matcher.longest(way), needed, ahead, config)
        if not plan.missing_blocks or (way is Partial.COPY and not plan.match.num_copied):
            break
    return plan


def _blocks_ahead(sequence: Sequence, config: ManagerConfig) -> int:
    """Blocks that last until the sequence's first sync; at most one more than its tokens need."""
    size = sequence.block_size
    return blocks_for(sequence.slots_for(len(sequence.tokens) + min(size, config.capacity_ahead_tokens)), size)


def claim(
    request: AdmitRequest, sequence: Sequence, plan: AdmissionPlan, number: int, config: ManagerConfig, now: float
) -> Admission:
    """Gives the sequence its number and the blocks of a plan that misses none; returns the answer."""
    executor, match, num_tokens = sequence.executor, plan.match, len(sequence.tokens)
    # Computed before blocks are evicted for the sequence.
    miss = None
    if request.explain_miss:
        miss = first_miss(sequence, match.tokens, _lowest_tier(request, sequence), now)
    # Read before the sequence takes over a block that continues its tokens.
    continuation = _continuation(request, sequence)
    sequence.handle = number
    # The keys of the partly used blocks, read before the blocks are taken over.
    sources = [block.key for block in match.sources]
    _claim_blocks(sequence, plan)
    for pool in executor.pools:
        if not request.no_read:
            pool.tokens.add(now, request.salt, num_tokens, match.tokens)
    publish_pending(sequence)
    if executor.ghosts is not None:
        source = sources[executor.ghosts.pool.spec.group] if sources else b""
        executor.ghosts.admitted(sequence, now, is_read=not request.no_read, source=source)
    sequence.scheduler.executors.add(executor.executor_id)
    receipts = sequence.retention.receipts(
        request.retention, executor.block_size, no_store=sequence.no_store, config=config
    )
    return admitted(
        sequence,
        0 if match.writer is None else match.writer.handle,
        tuple(receipts),
        continuation,
        miss,
        _stored_tokens(sequence, request.num_prompt_tokens or num_tokens),
    )


def _claim_blocks(sequence: Sequence, plan: AdmissionPlan) -> None:
    size, match = sequence.block_size, plan.match
    for table, blocks in zip(sequence.tables, match.blocks, strict=True):
        for block_index, block in enumerate(blocks):
            if block is not None:
                block.hits += 1
                table.pool.acquire(block)
                if not table.pool.grant(block, sequence.retention.at(block_index * size)):
                    sequence.retention.refused.add(block_index * size)
    for source, table in zip(match.sources, sequence.tables, strict=False):
        table.pool.acquire(source)
    for table, blocks in zip(sequence.tables, match.blocks, strict=True):
        _fetch(sequence, table, blocks)
        committed = [block is None or block.writer is None for block in blocks]
        table.committed = len(blocks) if all(committed) else committed.index(False)
        table.window_start = next(
            (block_index for block_index, block in enumerate(blocks) if block is not None), len(blocks)
        )
    if match.in_place:
        for source, table in zip(match.sources, sequence.tables, strict=True):
            table.pool.take_over(source, sequence)
            table.pool.release(source)
            table.blocks.append(source)
    else:
        copy_sources(sequence, match.sources, match.num_copied)
    grow(sequence, plan.needed + plan.ahead)
    sequence.computed = sequence.cached_tokens = match.tokens
    sequence.depend_on_writers()


def _fetch(sequence: Sequence, table: GroupTable, blocks: list[Block | None]) -> None:
    """Fills the table with the matched blocks; blocks of lower tiers are first copied to the device."""
    pool, table.blocks = table.pool, blocks
    for block_index, block in enumerate(blocks):
        if block is not None and not pool.is_on_device(block):
            target = blocks[block_index] = pool.allocate(sequence)
            onload(sequence, pool, block, target, block_index, 0)


def copy_sources(sequence: Sequence, sources: list[Block], num_tokens: int) -> None:
    """Appends to each table a block that begins as a copy of a source. The copy takes over the source's reference."""
    for table, source in zip(sequence.tables, sources, strict=False):
        target = table.pool.allocate(sequence)
        block_index = len(table.blocks)
        onload(sequence, table.pool, source, target, block_index, num_tokens)
        table.blocks.append(target)


def grow(sequence: Sequence, num_blocks: int) -> None:
    """Allocates blocks until every table has `num_blocks`; enough blocks must be free."""
    for table in sequence.tables:
        allocate, blocks = table.pool.allocate, table.blocks
        blocks += [allocate(sequence) for _ in range(num_blocks - len(blocks))]


def refusal(missing: int, missing_without_ceiling: int, account: Account | None) -> Admission:
    """Returns the answer for missing blocks, given how many are missing with and without a ceiling."""
    full = None if missing_without_ceiling or account is None else account.key
    return Admission(False, missing_blocks=missing, full_account=full)


def admitted(
    sequence: Sequence,
    wait_for: int,
    receipts: tuple[Receipt, ...] = (),
    continuation: tuple[int, ...] = (),
    miss: Miss | None = None,
    store_tokens: int = 0,
) -> Admission:
    return Admission(
        admitted=True,
        sequence_handle=sequence.handle,
        cached_tokens=sequence.cached_tokens,
        wait_for_handle=wait_for,
        capacity_tokens=sequence.capacity,
        block_tables=sequence.slots(),
        transfers=sequence.opened.take(),
        receipts=receipts,
        eviction_policy=None if sequence.eviction is None else sequence.eviction.policy,
        continuation=continuation,
        miss=miss,
        store_tokens=store_tokens,
    )
