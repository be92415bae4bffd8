"""The scheduler and the executor of a case: admits, computes, reports, copies, confirms and releases."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.conformance.backends import Backend, Refused
from tests.support.device import Content, Device, contents

EXECUTOR, SCHEDULER = "gpu", "front"
SCHEDULED = {"scheduler_id": SCHEDULER, "scheduler_epoch": 1}


@dataclass(eq=False)
class Live:
    """A sequence. The K and V of its newest token are never there: the step that comes next would write them."""

    name: str
    handle: int
    tokens: list[int]
    scope: tuple[str | None, int | None]
    extra: list[pb.ExtraKey]
    tables: list[list[int]]
    cached: int
    wait_for: int = 0
    computed: int = 0
    reported: int = 0
    ended: bool = False

    @property
    def contents(self) -> list[Content]:
        """What each of its tokens leaves in memory."""
        return contents(self.scope, self.tokens, self.extra)


@dataclass
class Player:
    """One executor with its pools and one scheduler, against one backend."""

    backend: Backend
    block_size: int
    pools: list[pb.PoolSpec]
    reuse: bool = True
    sequences: dict[str, Live] = field(default_factory=dict)
    # Of the last call that gave any.
    transfers: list[pb.Transfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        windows = [pool.attention_window if pool.HasField("attention_window") else None for pool in self.pools]
        self.windowed = any(windows)
        self.device = Device(self.block_size, windows, pb.TIER_DEVICE)
        self._sync_numbers = count(1)
        self._step = 0
        self.manager_epoch = self.backend.call(
            "RegisterScheduler", pb.RegisterSchedulerRequest(**SCHEDULED)
        ).manager_epoch
        registration = pb.RegisterExecutorRequest(
            executor_id=EXECUTOR,
            executor_epoch=1,
            model="m",
            model_fingerprint=bytes(32),
            block_size=self.block_size,
            pools=self.pools,
        )
        self.backend.call("RegisterExecutor", registration)

    # Calls

    def admission(self, name: str, token_ids: list[int], **options: Any) -> pb.AdmitSequenceRequest:
        """The request; reuse that a case switches off is neither read nor stored."""
        options = {"no_read": not self.reuse, "no_store": not self.reuse} | options
        return pb.AdmitSequenceRequest(
            sequence_id=name, executor_id=EXECUTOR, token_ids=token_ids, **SCHEDULED, **options
        )

    def add(self, name: str, token_ids: list[int], **options: Any) -> pb.AdmitSequenceResponse:
        """Admits a sequence and runs its copies; computes nothing."""
        answer = self._admit(self.admission(name, token_ids, **options))
        if answer.admitted:
            scope = (options.get("salt"), options.get("adapter_id"))
            self._enter(name, answer, token_ids, scope, options.get("extra_keys", []))
            self.sequences[name].wait_for = answer.wait_for_handle
            self.sequences[name].cached = answer.cached_tokens
            self.sequences[name].computed = self.sequences[name].reported = answer.cached_tokens
        return answer

    def _admit(self, admission: pb.AdmitSequenceRequest) -> pb.AdmitSequenceResponse:
        """The answer to an admission. Raises Refused with the fields of the admission."""
        try:
            [answer] = self.backend.call("AdmitSequences", pb.AdmitSequencesRequest(admissions=[admission])).answers
        except Refused as error:
            error.fields = {field.removeprefix("admissions[0]."): text for field, text in error.fields.items()}
            raise
        return answer

    def fork(self, parent_name: str, name: str) -> pb.ForkSequenceResponse:
        """Forks a sequence and runs the copies."""
        parent = self.sequences[parent_name]
        request = pb.ForkSequenceRequest(parent_sequence_id=parent_name, sequence_id=name, **SCHEDULED)
        answer = self.backend.call("ForkSequence", request)
        if answer.admitted:
            self._enter(name, answer, parent.tokens, parent.scope, parent.extra)
            child = self.sequences[name]
            child.cached = child.computed = child.reported = parent.reported
        return answer

    def _enter(self, name: str, answer: Any, token_ids: list[int], scope: Any, extra: list[pb.ExtraKey]) -> None:
        tables = [list(table.slots) for table in answer.block_tables]
        self.sequences[name] = Live(name, answer.sequence_handle, list(token_ids), scope, extra, tables, 0)
        self.copy(answer.transfers)

    def compute(self, name: str, length: int | None = None) -> None:
        """Computes `length` tokens, by default all known tokens but the newest, and reports them."""
        live = self.sequences[name]
        self._compute(live, len(live.tokens) - 1 if length is None else length)
        self._report(live)

    def ask_again(self, name: str) -> int:
        """Asks for the blocks that were missing, with nothing new to report; returns how many are missing now."""
        live = self.sequences[name]
        needed = self._blocks_for(len(live.tokens))
        if len(live.tables[0]) < needed:
            self._sync(live, handles=[live.handle], computed_tokens=[live.reported], new_token_counts=[0])
        return max(0, needed - len(live.tables[0]))

    def append(self, name: str, token_ids: list[int]) -> int:
        """Generates these tokens one by one; returns the missing blocks of the last of them."""
        live = self.sequences[name]
        short = 0
        for token in token_ids:
            assert not short, "there is no block for the token before"
            self._compute(live, len(live.tokens))
            live.tokens.append(token)
            short = self._report(live, [token])
        return short

    def truncate(self, name: str, length: int) -> pb.TruncateSequenceResponse:
        """Takes tokens back; all that was computed is reported before."""
        live = self.sequences[name]
        if live.computed > live.reported:
            self._sync(live, handles=[live.handle], computed_tokens=[live.computed], new_token_counts=[0])
        request = pb.TruncateSequenceRequest(sequence_id=name, num_tokens=length, **SCHEDULED)
        answer = self.backend.call("TruncateSequence", request)
        del live.tokens[length:]
        live.computed = live.reported = min(live.computed, length - 1)
        for table in live.tables:
            del table[self._blocks_for(length) :]
        return answer

    def release(self, name: str, *, stored: bool = True) -> None:
        """Ends a sequence: with all its progress reported, or as if nothing more had been computed."""
        live = self.sequences[name]
        live.ended = True
        if not stored:
            self._sync(live, released_handles=[live.handle])
            return
        self._compute(live, len(live.tokens) - 1)
        self.device.read(live.tables, live.contents, live.computed, live.computed)
        self._sync(
            live,
            handles=[live.handle],
            computed_tokens=[live.computed],
            new_token_counts=[0],
            released_handles=[live.handle],
        )

    # What happens in between

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _compute(self, live: Live, end: int) -> None:
        """What is shared is computed by its owner first."""
        if live.wait_for:
            writer = next(other for other in self.sequences.values() if other.handle == live.wait_for)
            live.wait_for = 0
            if not writer.ended and writer.computed < live.cached:
                self._compute(writer, live.cached)
                self._report(writer)
        if end > live.computed:
            self._step += 1
            self.device.write(live.tables, live.contents, live.computed, end)
            self.device.read(live.tables, live.contents, live.computed, end)
            live.computed = end

    def _report(self, live: Live, new_tokens: list[int] | None = None) -> int:
        """Reports progress; returns the missing blocks of the sequence.

        A manager gives capacity for the two steps behind what is computed, a token more than cases count. Where the
        length fills its blocks that would be one more: there the last token is reported later when it makes no
        difference, and else the block is released.
        """
        length = len(live.tokens)
        computed = min(live.computed, length - 1)
        if length % self.block_size == 0 and not self.windowed:
            computed = min(computed, length - 2)
        computed = max(computed, live.reported)
        short = 0
        if computed > live.reported or new_tokens:
            answer = self._sync(
                live,
                handles=[live.handle],
                computed_tokens=[computed],
                new_token_counts=[len(new_tokens or [])],
                new_token_ids=new_tokens,
            )
            short = answer.missing_blocks
        needed = self._blocks_for(length)
        if len(live.tables[0]) > needed:
            self._sync(live, trimmed_handles=[live.handle], trimmed_capacity_tokens=[length])
            for table in live.tables:
                del table[needed:]
        return max(0, needed - len(live.tables[0])) if short else 0

    def _sync(self, live: Live, **columns: Any) -> pb.SyncSequencesResponse:
        request = pb.SyncSequencesRequest(
            manager_epoch=self.manager_epoch,
            sync_number=next(self._sync_numbers),
            step=self._step,
            **SCHEDULED,
            **columns,
        )
        answer = self.backend.call("SyncSequences", request)
        assert list(answer.unknown_handles) == []
        if request.computed_tokens:
            live.reported = request.computed_tokens[0]
        slots = list(answer.extended_slots)
        for group, given in zip(answer.extended_groups, answer.extended_counts, strict=True):
            live.tables[group] += slots[:given]
            del slots[:given]
        self.copy(answer.transfers)
        return answer

    def copy(self, transfers: Any) -> None:
        """Runs transfers and confirms them."""
        self.transfers = list(transfers)
        if not self.transfers:
            return
        for transfer in self.transfers:
            self.device.copy(transfer)
        request = pb.ConfirmTransfersRequest(
            executor_id=EXECUTOR, executor_epoch=1, tickets=[transfer.ticket for transfer in self.transfers]
        )
        assert self.backend.call("ConfirmTransfers", request).unknown_tickets == 0
