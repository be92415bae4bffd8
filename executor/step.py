"""A step and its outcome as the executor handles them, free of messages."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.kvcommon.eviction import Policy


@dataclass(frozen=True)
class Sampling:
    """How to choose a token; the fields of execution.v1.SamplingParams."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Joining:
    """A sequence that joins. tables: slots per layer group. policy: how it evicts tokens, None for not at all.

    traceparent: W3C trace context of its request, empty for none.
    """

    sequence: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: tuple[tuple[int, ...], ...]
    sampling: Sampling = Sampling()
    policy: Policy | None = None
    traceparent: str = ""


@dataclass(frozen=True)
class Growth:
    """Slots appended to one table."""

    sequence: int
    group: int
    slots: tuple[int, ...]


class Tier(enum.IntEnum):
    """Where a block's bytes live, numbered as in messages."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True)
class Copy:
    """A block copy that a ticket of the cache manager stands for. Source 0 overwrites the target with zeros."""

    ticket: int
    group: int
    source: int
    target: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE

    @property
    def within_device(self) -> bool:
        """Whether it runs in the order of the device's work, and not beside it."""
        return self.target_tier is Tier.DEVICE and (self.source_tier is Tier.DEVICE or not self.source)


@dataclass(frozen=True)
class Step:
    """A diff of the running set; chunks: sequence -> tokens to compute.

    evicting: sequences that evict tokens for the first time -> the table that what they keep moves to, () to stay.
    awaits_copies: nothing is to be done but to wait for a copy from a lower tier.
    """

    number: int
    removed: tuple[int, ...] = ()
    joining: tuple[Joining, ...] = ()
    chunks: Mapping[int, int] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    growth: tuple[Growth, ...] = ()
    copies: tuple[Copy, ...] = ()
    evicting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    awaits_copies: bool = False

    @property
    def tickets(self) -> tuple[int, ...]:
        """Tickets of its copies."""
        return tuple(copy.ticket for copy in self.copies)


@dataclass(frozen=True)
class Logprobs:
    """Of one sampled token and of the most likely ones, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Sampled:
    """One sequence's new token."""

    sequence: int
    token_id: int
    stopped: bool
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Evicted:
    """What a sequence evicted before a step. mass: share of the scores that stayed, None without scores."""

    sequence: int
    tokens: int
    mass: float | None


@dataclass(frozen=True)
class Outcome:
    """What a step did. Times in seconds.

    tickets: its copies within the device. copied, failed: copies from lower tiers to the device that have ended since
    the outcome before, well or not. block_times: what a block takes from a lower tier to the device, as far as known.
    """

    number: int
    sampled: tuple[Sampled, ...]
    num_tokens: int
    compute_time: float
    idle_time: float
    tickets: tuple[int, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    copied: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    block_times: Mapping[Tier, float] = field(default_factory=dict)
