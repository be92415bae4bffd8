"""Matching, claiming and allocating for one sequence, in one go."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import sha256

from cachemgr import matching, retention
from cachemgr.api import Admission, AdmitRequest, ManagerConfig
from cachemgr.block import Block
from cachemgr.errors import InvalidField, SequenceTooLongError
from cachemgr.keys import pack, packed_bytes
from cachemgr.matching import Match
from cachemgr.pool import Pool
from cachemgr.registry import Executor, Scheduler
from cachemgr.retention import REQUEST, SESSION, Wishes
from cachemgr.sequence import Sequence, blocks_for
from cachemgr.settling import promise
from cachemgr.transfers import Ticket

MAX_ID_BYTES = 256


def check_id(field: str, value: str) -> None:
    """Raises InvalidField for an id that is empty or too long."""
    if not value:
        raise InvalidField(field, "must not be empty")
    if len(value.encode()) > MAX_ID_BYTES:
        raise InvalidField(field, f"must be at most {MAX_ID_BYTES} bytes")


def check_request(request: AdmitRequest) -> array[int]:
    """Returns the packed tokens. Raises InvalidField for what is wrong without looking at any state."""
    check_id("sequence_id", request.sequence_id)
    if not request.token_ids:
        raise InvalidField("token_ids", "must not be empty")
    if request.salt == "":
        raise InvalidField("salt", "must not be empty; leave it out for none")
    if request.adapter_id is not None and not 0 <= request.adapter_id < 1 << 64:
        raise InvalidField("adapter_id", "must fit into 64 bits")
    for field in ("session_id", "request_id"):
        value = getattr(request, field)
        if value is not None:
            check_id(field, value)
    prompt = request.num_prompt_tokens
    if prompt is not None and not 1 <= prompt <= len(request.token_ids):
        raise InvalidField("num_prompt_tokens", f"must be from 1 to the {len(request.token_ids)} tokens known")
    retention.check(request.retention)
    try:
        return pack(request.token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidField("token_ids", "must be numbers from 0 to 4294967295") from error


def content(request: AdmitRequest, tokens: array[int]) -> object:
    """What two admissions with one id must have in common to be the same."""
    return (
        request.scheduler_id,
        request.executor_id,
        sha256(packed_bytes(tokens)).digest(),
        request.salt,
        request.adapter_id,
        _holder(request),
        request.num_prompt_tokens,
        request.retention,
        request.no_read,
        request.no_store,
    )


def _holder(request: AdmitRequest) -> str:
    """Whose wishes they are."""
    if request.session_id is not None:
        return SESSION + request.session_id
    return REQUEST + (request.request_id or request.sequence_id)


def watermark(pool: Pool, config: ManagerConfig) -> int:
    """Blocks of a pool that are left free for sequences that run already."""
    return int(pool.spec.num_blocks * config.free_watermark)


def check_length(executor: Executor, tokens: int, field: str) -> None:
    """Raises SequenceTooLongError when so many tokens can never fit."""
    blocks = min(pool.spec.num_blocks for pool in executor.pools)
    if blocks_for(tokens, executor.block_size) > blocks:
        text = f"{tokens} tokens do not fit into {blocks} blocks of {executor.block_size}"
        raise SequenceTooLongError(text, fields={field: f"must be at most {blocks * executor.block_size} tokens"})


class Admitter:
    """Takes blocks for sequences. Numbers come from `next_number`, which never gives one twice."""

    def __init__(self, config: ManagerConfig, next_number: Callable[[], int]) -> None:
        self._config = config
        self._next_number = next_number

    def admit(
        self, request: AdmitRequest, tokens: array[int], scheduler: Scheduler, executor: Executor
    ) -> tuple[Sequence | None, int]:
        """The sequence with its blocks, or None and how many blocks are missing, with nothing changed."""
        check_length(executor, len(tokens), "token_ids")
        domain = executor.domain(request.salt, request.adapter_id)
        wishes = Wishes(request.retention, request.num_prompt_tokens or len(tokens), _holder(request))
        sequence = Sequence(request.sequence_id, 0, scheduler, executor, tokens, domain, wishes, request.no_store)
        needed = blocks_for(len(tokens), executor.block_size)
        if request.no_read:
            match = matching.nothing(sequence)
        else:
            match = matching.find(sequence, partial=self._config.partial_reuse)
        short = self._missing(executor, match, needed)
        if short and match.num_copied:
            # The source of a copy is kept besides the block that it is copied to.
            match = matching.find(sequence, partial=False)
            short = self._missing(executor, match, needed)
        if short:
            return None, short
        sequence.handle = self._next_number()
        sequence.content = content(request, tokens)
        self._claim(sequence, match, needed)
        for pool in executor.pools:
            if not request.no_read:
                pool.queried_tokens += len(tokens)
                pool.hit_tokens += match.tokens
        promise(sequence)
        scheduler.executors.add(executor.executor_id)
        wait_for = 0 if match.writer is None else match.writer.handle
        sequence.admission = self._answer(sequence, wait_for)
        return sequence, 0

    def _missing(self, executor: Executor, match: Match, needed: int) -> int:
        short = 0
        for group, pool in enumerate(executor.pools):
            claimed = {block for block in match.blocks[group] if block is not None and not block.refs}
            if match.sources and not match.sources[group].refs:
                claimed.add(match.sources[group])
            keep = watermark(pool, self._config) if executor.sequences else 0
            fresh = needed - len(match.blocks[group])
            short += max(0, fresh + keep - (pool.free - len(claimed)))
        return short

    def _claim(self, sequence: Sequence, match: Match, needed: int) -> None:
        size = sequence.block_size
        # A block's worth carries it to its first sync; whole runways for all who come would leave none to admit.
        ahead = blocks_for(len(sequence.tokens) + min(size, self._config.capacity_ahead_tokens), size)
        for table, blocks in zip(sequence.tables, match.blocks, strict=True):
            for place, block in enumerate(blocks):
                if block is not None:
                    table.pool.retain(block)
                    table.pool.grant(block, sequence.wishes.at(place * size))
            table.blocks = blocks
            settled = [block is None or block.writer is None for block in blocks]
            table.settled = len(blocks) if all(settled) else settled.index(False)
            table.first = next((place for place, block in enumerate(blocks) if block is not None), len(blocks))
        self._copy(sequence, match.sources, match.num_copied)
        self.grow(sequence, needed)
        spare = min(table.pool.free - watermark(table.pool, self._config) for table in sequence.tables)
        self.grow(sequence, min(ahead, needed + max(0, spare)))
        sequence.computed = sequence.cached_tokens = match.tokens
        sequence.depend_on_writers()

    def _copy(self, sequence: Sequence, sources: list[Block], num_tokens: int) -> None:
        """Appends a block to each table that begins with a copy. A source is reserved before its target is taken."""
        if not num_tokens:
            return
        for table, source in zip(sequence.tables, sources, strict=True):
            table.pool.retain(source)
            target = table.pool.take(sequence)
            Ticket(self._next_number(), table.pool, source, target, num_tokens, len(table.blocks), sequence)
            table.blocks.append(target)

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """Appends empty blocks to every table until it has so many; they must be free."""
        for table in sequence.tables:
            take, blocks = table.pool.take, table.blocks
            blocks += [take(sequence) for _ in range(num_blocks - len(blocks))]

    def fork(self, parent: Sequence, sequence_id: str) -> tuple[Sequence | None, int]:
        """A sequence that shares the parent's computed blocks, or None and how many blocks are missing."""
        executor = parent.executor
        size = executor.block_size
        full, copied = divmod(parent.computed, size)
        needed = blocks_for(len(parent.tokens), size)
        short = sum(max(0, needed - full - table.pool.free) for table in parent.tables)
        if short:
            return None, short
        child = Sequence(
            sequence_id,
            self._next_number(),
            parent.scheduler,
            executor,
            array("I", parent.tokens),
            parent.domain,
            parent.wishes,
            parent.no_store,
        )
        child.content = ("fork", parent.sequence_id)
        child.step = parent.step
        child.keys = parent.keys[:full]
        sources = []
        for mine, theirs in zip(child.tables, parent.tables, strict=True):
            mine.blocks = theirs.blocks[:full]
            mine.anchors = {place: block for place, block in theirs.anchors.items() if place < full}
            mine.settled, mine.first = full, min(theirs.first, full)
            for block in mine.references():
                mine.pool.retain(block)
            if copied:
                source = theirs.blocks[full]
                assert source is not None
                sources.append(source)
        self._copy(child, sources, copied)
        self.grow(child, needed)
        child.computed = child.cached_tokens = parent.computed
        child.admission = self._answer(child, 0)
        return child, 0

    @staticmethod
    def _answer(sequence: Sequence, wait_for: int) -> Admission:
        tickets = sorted(sequence.tickets, key=lambda ticket: ticket.number)
        return Admission(
            admitted=True,
            sequence_handle=sequence.handle,
            cached_tokens=sequence.cached_tokens,
            wait_for_handle=wait_for,
            capacity_tokens=sequence.capacity,
            block_tables=sequence.slots(),
            transfers=tuple([ticket.transfer for ticket in tickets]),
        )
