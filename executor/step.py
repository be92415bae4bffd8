"""A step and its output as the executor handles them, free of messages."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.kvcommon.eviction import Policy

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) that depends on its arguments alone (splitmix64, Steele et al. 2014)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / float(1 << 53)


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
class NewSequence:
    """A sequence that joins. tables: per layer group the slots of its blocks. policy: of its token eviction, or None.

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
class BlockTableUpdate:
    """Slots appended to one block table."""

    sequence: int
    group: int
    slots: tuple[int, ...]


class Tier(enum.IntEnum):
    """Where a block's bytes are, numbered as in messages."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True)
class Copy:
    """A copy of one block under a ticket of the cache manager. Source 0 overwrites the target with zeros."""

    ticket: int
    group: int
    source: int
    target: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE

    @property
    def within_device(self) -> bool:
        """Whether it runs in the order of the device's work, and not asynchronously."""
        return self.target_tier is Tier.DEVICE and (self.source_tier is Tier.DEVICE or not self.source)

    @property
    def is_onload(self) -> bool:
        """Whether it brings a block from a lower tier to the device."""
        return self.target_tier is Tier.DEVICE and not self.within_device


@dataclass(frozen=True)
class Step:
    """A diff of the running batch. chunks: sequence -> tokens to compute. idle: sequences that compute nothing.

    evicting: sequences that evict tokens for the first time -> the block table that the kept tokens move to, () where
    they stay. awaits_copies: the step only waits for an onload.
    """

    number: int
    removed: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    chunks: Mapping[int, int] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    table_updates: tuple[BlockTableUpdate, ...] = ()
    copies: tuple[Copy, ...] = ()
    evicting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    awaits_copies: bool = False

    @property
    def tickets(self) -> tuple[int, ...]:
        return tuple(copy.ticket for copy in self.copies)

    @property
    def tickets_within_device(self) -> tuple[int, ...]:
        """Tickets of its copies that run in the order of the device's work."""
        return tuple(copy.ticket for copy in self.copies if copy.within_device)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of one sampled token and of the most likely ones, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class SampledToken:
    """One sequence's new token."""

    sequence: int
    token_id: int
    stopped: bool
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Evicted:
    """Tokens that a sequence evicted before a step. mass: share of the scores that stayed, None without scores."""

    sequence: int
    tokens: int
    mass: float | None


@dataclass(frozen=True)
class StepOutput:
    """The output of a step. Times in seconds.

    tickets: its copies within the device. copied, failed: onloads that have ended since the output before.
    block_times: seconds that a block takes from a lower tier to the device, as far as known.
    """

    number: int
    sampled: tuple[SampledToken, ...]
    num_tokens: int
    compute_time: float
    idle_time: float
    tickets: tuple[int, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    copied: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    block_times: Mapping[Tier, float] = field(default_factory=dict)
