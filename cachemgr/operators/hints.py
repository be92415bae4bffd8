"""Hints of agent frameworks about cached blocks: each action of an envelope is carried out and answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cachemgr.retention.bounds import MAX_PRIORITY, bounded
from cachemgr.retention.hint_actions import ACTION_VERSION, PayloadError, gives_retention, priority_of, seconds_of
from cachemgr.retention.priority import HINT, RetentionRequest
from cachemgr.sequences.holds import with_ancestors
from cachemgr.sequences.prefix_match import cached_chain
from cachemgr.sequences.transfers import prefetch
from cachemgr.types import HintAction, HintAnswer, HintOutcome, Hints, Outcome, Transfer
from cachemgr.validation import MAX_ID_BYTES

if TYPE_CHECKING:
    from cachemgr.blocks.block import Block
    from cachemgr.blocks.block_pool import BlockPool
    from cachemgr.sequences.clients import Executor
    from cachemgr.types import ManagerConfig

    Blocks = list[tuple[BlockPool, Block]]

# An action's outcome, its detail, and how many blocks it changed.
Result = tuple[HintOutcome, str, int]

# Once the pins of one envelope have this many blocks, further pins are rejected: some 30 ms of work.
MAX_PINNED_BLOCKS = 1 << 15


class HintRunner:
    """Carries out hints about one prefix. `transfers` are the copies that the hints began."""

    def __init__(
        self,
        prefixes: list[tuple[Executor, list[bytes]]],
        holder: str,
        config: ManagerConfig,
        now: float,
        tenant_id: str | None = None,
    ) -> None:
        """`prefixes`: per executor, the keys of the prefix's full blocks, hashed once for all actions.

        `holder` is the holder of all leases. A pin has the owner that its hint names, after a prefix for the tenant.
        """
        self._owners = HINT if tenant_id is None else f"{HINT}{tenant_id}/"
        self._prefixes = prefixes
        self._holder = holder
        self._config = config
        self._now = now
        self._is_last_request = True
        # Kept between actions, since looking a long prompt up for each of very many actions is slow. Cached blocks of
        # the prefix are kept until an action moves blocks. Results of moves that moved no block are kept until an
        # action changes anything.
        self._found: Blocks | None = None
        # By executor: the blocks that a pin may keep.
        self._pinnable: list[tuple[Executor, Blocks]] | None = None
        self._futile: dict[str, Result] = {}
        self._num_pinned = 0
        self.transfers: list[Transfer] = []

    def run(self, hints: Hints, *, later: bool = False) -> list[HintAnswer]:
        """Returns one answer per action, in order. `later`: missing blocks to retain are about to be computed."""
        requests = [index for index, action in enumerate(hints.actions) if gives_retention(action)]
        answers = []
        for index, action in enumerate(hints.actions):
            # Each request replaces the previous request; only the last request is granted, on every block.
            self._is_last_request = index == requests[-1] if requests else False
            answers.append(self._answer(action))
        if not later:
            return answers
        retained = [action.action_type == "Retain" for action in hints.actions]
        return [
            answer._replace(outcome=HintOutcome.DEFERRED, detail="when the blocks are computed")
            if is_retain and answer.outcome is HintOutcome.MISSING
            else answer
            for answer, is_retain in zip(answers, retained, strict=True)
        ]

    def _answer(self, action: HintAction) -> HintAnswer:
        kinds: dict[str, Callable[[Mapping[str, Any], Blocks], Result]] = {
            "Retain": self._retain,
            "Pin": self._pin,
            "Demote": self._demote,
            "Prefetch": self._prefetch,
            "Share": self._share,
        }
        run = kinds.get(action.action_type)
        if run is None:
            detail = f"action_type must be one of {', '.join(kinds)}"
            return HintAnswer(action.action_id, HintOutcome.REJECTED, detail)
        if action.action_version != ACTION_VERSION:
            return HintAnswer(action.action_id, HintOutcome.REJECTED, f'action_version must be "{ACTION_VERSION}"')
        try:
            outcome, detail, count = run(action.payload, self._blocks())
        except PayloadError as error:
            return HintAnswer(action.action_id, HintOutcome.REJECTED, f"payload.{error}")
        return HintAnswer(action.action_id, outcome, detail, count)

    def _blocks(self) -> Blocks:
        if self._found is None:
            self._found = [
                (pool, block)
                for executor, keys in self._prefixes
                for pool in executor.pools
                for block in cached_chain(pool, keys)
            ]
        return self._found

    def _moved(self, kind: str, move: Callable[[Blocks], Result], blocks: Blocks) -> Result:
        """Moves blocks; reuses an earlier result if that move moved no block and nothing has changed since."""
        if kind not in self._futile:
            result = move(blocks)
            if result[2]:
                self._found = self._pinnable = None
                self._futile.clear()
                return result
            self._futile[kind] = result
        return self._futile[kind]

    def _retain(self, payload: Mapping[str, Any], blocks: Blocks) -> Result:
        asked = priority_of(payload, "priority", None), seconds_of(payload, required=False)
        if asked[0] is None:
            raise PayloadError("priority must be given")
        if not blocks:
            return HintOutcome.MISSING, "", 0
        granted = bounded(self._holder, asked[0], asked[1], self._config)
        request = RetentionRequest(self._holder, *granted)
        count = self._grant(request, blocks)
        clipped = []
        if granted != asked:
            lasts = "without end" if granted[1] is None else f"for {granted[1]:g} s"
            clipped.append(f"priority {granted[0]} {lasts}")
        if count < len(blocks):
            clipped.append(f"{len(blocks) - count} blocks have too many leases of a higher priority or more time")
        return (HintOutcome.CLIPPED if clipped else HintOutcome.ACCEPTED), "; ".join(clipped), count

    def _grant(self, request: RetentionRequest, blocks: Blocks) -> int:
        """Grants a request unless a later action replaces it; returns how many blocks got the lease, or would have."""
        if not self._is_last_request:
            return len(blocks)
        self._futile.clear()
        return sum(pool.grant(block, request) for pool, block in blocks)

    def _pin(self, payload: Mapping[str, Any], blocks: Blocks) -> Result:
        owner, seconds = payload.get("owner"), seconds_of(payload, required=True)
        if not isinstance(owner, str) or not 1 <= len(owner.encode()) <= MAX_ID_BYTES:
            raise PayloadError(f"owner must be a text of 1 to {MAX_ID_BYTES} bytes")
        assert seconds is not None
        priority, granted = bounded(self._holder, MAX_PRIORITY, seconds, self._config)
        if priority < MAX_PRIORITY:
            return HintOutcome.REJECTED, f"a pin needs priority {MAX_PRIORITY}, and at most {priority} is allowed", 0
        assert granted is not None
        if not blocks:
            return HintOutcome.MISSING, "", 0
        if self._num_pinned >= MAX_PINNED_BLOCKS:
            return HintOutcome.REJECTED, f"the pins of this request already cover {self._num_pinned} blocks", 0
        self._futile.clear()
        count, clipped, names = 0, [] if granted == seconds else [f"for {granted:g} s"], []
        if self._pinnable is None:
            self._pinnable = [
                (executor, with_ancestors([(pool, block) for pool, block in blocks if pool in executor.pools]))
                for executor, _ in self._prefixes
            ]
        self._num_pinned += sum(len(mine) for _, mine in self._pinnable)
        for executor, mine in self._pinnable:
            # A hint must not displace operators' pins or pin in the name of an operator.
            pinned = executor.holds.pin(mine, self._owners + owner, self._now, granted, displace=False)
            count += pinned.receipt.num_blocks
            names.append(pinned.name)
            if pinned.receipt.outcome is not Outcome.GRANTED:
                clipped.append(pinned.receipt.reason)
        if not count:
            return HintOutcome.REJECTED, clipped[-1], 0
        detail = "; ".join([*filter(None, names), *clipped])
        return (HintOutcome.CLIPPED if clipped else HintOutcome.ACCEPTED), detail, count

    def _demote(self, payload: Mapping[str, Any], blocks: Blocks) -> Result:
        priority = priority_of(payload, "priority", 0)
        assert priority is not None
        tier = payload.get("tier")
        if tier not in (None, "host"):
            raise PayloadError('tier must be "host"')
        if not blocks:
            return HintOutcome.MISSING, "", 0
        if tier is None:
            request = RetentionRequest(self._holder, *bounded(self._holder, priority, None, self._config))
            self._grant(request, blocks)
            kept = sum(block.priority > priority for _, block in blocks) if self._is_last_request else 0
            if kept:
                why = f"leases of other holders keep {kept} of the blocks at a higher priority"
                return HintOutcome.CLIPPED, why, len(blocks)
            return HintOutcome.ACCEPTED, "", len(blocks)
        return self._moved("Demote", self._offload, blocks)

    @staticmethod
    def _offload(blocks: Blocks) -> Result:
        # Leaves first, since a block can only be offloaded when it has no child on the device.
        movable = [(pool, block) for pool, block in reversed(blocks) if pool.is_on_device(block)]
        count = sum(block.lru_prev is not None and pool.offloader.demote(block) for pool, block in movable)
        if count < len(movable):
            outcome = HintOutcome.CLIPPED if count else HintOutcome.REJECTED
            why = "in use, of too low a priority, or without a slot in a lower tier"
            return outcome, f"{len(movable) - count} blocks were not offloaded: {why}", count
        return HintOutcome.ACCEPTED, "", count

    def _prefetch(self, _payload: Mapping[str, Any], blocks: Blocks) -> Result:
        return self._moved("Prefetch", self._fetch, blocks) if blocks else (HintOutcome.MISSING, "", 0)

    def _fetch(self, blocks: Blocks) -> Result:
        below = sum(not pool.is_on_device(block) for pool, block in blocks)
        if not below:
            return HintOutcome.ACCEPTED, "all blocks are on the device", 0
        begun: list[Transfer] = []
        for executor, keys in self._prefixes:
            for pool in executor.pools:
                # Looked up again, since blocks of the prefix may have been evicted for another group's blocks.
                begun += prefetch(executor, pool, cached_chain(pool, keys))
        self.transfers += begun
        if not begun:
            return HintOutcome.REJECTED, "the device has no free blocks, or copies are in flight", 0
        outcome = HintOutcome.DEFERRED if len(begun) == below else HintOutcome.CLIPPED
        return outcome, f"copies of {len(begun)} blocks have begun", len(begun)

    def _share(self, _: Mapping[str, Any], blocks: Blocks) -> Result:
        if not blocks:
            return HintOutcome.MISSING, "", 0
        return HintOutcome.ACCEPTED, "requests with its salt share it", len(blocks)
