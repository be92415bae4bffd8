"""A step and its output as the executor handles them, free of messages."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protos.kvcommon.eviction import Policy

# Most sequences in the running batch.
MAX_SEQUENCES = 4096


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Returns random numbers in [0, 1), [N] float64, each determined by one seed below 2**64 and one position.

    splitmix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators").
    """
    z = np.array(seeds, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * np.uint64(0x94D049BB133111EB)
    numbers: np.ndarray = ((z ^ (z >> 31)) >> 11) / np.float64(1 << 53)
    return numbers


def uniform(seed: int, position: int) -> float:
    """Returns one of `uniforms`."""
    return float(uniforms([seed], [position])[0])


class GrammarKind(enum.Enum):
    """The language in which the form of an output is written."""

    # JSON text of a JSON Schema.
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # JSON text of a list of texts.
    CHOICE = "choice"
    # In the syntax of Lark or of GBNF.
    GRAMMAR = "grammar"
    # JSON text of a list of [trigger, begin, JSON text of a JSON Schema, end].
    STRUCTURAL_TAGS = "structural_tags"


@dataclass(frozen=True)
class Grammar:
    """The form that an output must have."""

    kind: GrammarKind
    text: str


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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    num_prompt_logprobs: int | None = None

    @property
    def restricts(self) -> bool:
        """Whether a grammar, biases, or allowed or forbidden tokens change the logits."""
        return bool(self.grammar or self.logit_bias or self.min_tokens or self.bad_token_ids or self.allowed_token_ids)

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class NewSequence:
    """A sequence that joins. tables: per layer group, the slots of its blocks. policy: its token eviction, or None.

    traceparent: W3C trace context of its request, empty for none. continuation: ids that may follow, for drafts.
    adapter_id: that of a loaded adapter, None for none.
    """

    sequence: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: tuple[tuple[int, ...], ...]
    sampling: Sampling = Sampling()
    policy: Policy | None = None
    traceparent: str = ""
    continuation: tuple[int, ...] = ()
    adapter_id: int | None = None


@dataclass(frozen=True)
class BlockTableUpdate:
    """Slots appended to one block table."""

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
    """A copy of one block under a ticket of the cache manager. Source 0 overwrites the target with zeros."""

    ticket: int
    group: int
    source: int
    target: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE

    @property
    def within_device(self) -> bool:
        """Whether the copy runs in the order of the device's work, not asynchronously."""
        return self.target_tier is Tier.DEVICE and (self.source_tier is Tier.DEVICE or not self.source)

    @property
    def is_onload(self) -> bool:
        """Whether the copy brings a block from a lower tier to the device."""
        return self.target_tier is Tier.DEVICE and not self.within_device


@dataclass(frozen=True)
class Step:
    """A diff of the running batch. chunks: sequence -> tokens to compute. idle: sequences that compute nothing.

    evicting: sequences that evict tokens for the first time -> the block table that the kept tokens move to, () if they
    stay. windows: sequences whose adaptive window has a new length from now on -> its tokens. looking: sequences whose
    output says how long their adaptive window is to be. awaits_copies: the step only waits for an onload.
    drafts: decoding sequences -> most drafted tokens.
    """

    number: int
    removed: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    chunks: Mapping[int, int] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    table_updates: tuple[BlockTableUpdate, ...] = ()
    copies: tuple[Copy, ...] = ()
    evicting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    windows: Mapping[int, int] = field(default_factory=dict)
    looking: frozenset[int] = frozenset()
    awaits_copies: bool = False
    drafts: Mapping[int, int] = field(default_factory=dict)

    @property
    def tickets(self) -> tuple[int, ...]:
        return tuple(copy.ticket for copy in self.copies)

    @property
    def tickets_within_device(self) -> tuple[int, ...]:
        """Tickets of the step's copies that run in the order of the device's work."""
        return tuple(copy.ticket for copy in self.copies if copy.within_device)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of one token and of the most likely ones, best first.

    rank: of a prompt token, how many tokens, including itself, are at least as likely; 0 for a sampled token.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int = 0

    def best(self, count: int) -> "Logprobs":
        """Returns the log-probabilities with only the `count` most likely tokens."""
        return Logprobs(self.logprob, self.top_ids[:count], self.top_logprobs[:count])


class SampledToken(NamedTuple):
    """A new token of one sequence. failed: it only ends an output whose grammar could not be followed any further."""

    sequence: int
    token_id: int
    stopped: bool
    logprobs: Logprobs | None = None
    failed: bool = False


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a sequence's prompt tokens from a position on."""

    sequence: int
    position: int
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True)
class Evicted:
    """Tokens that a sequence evicted before a step. mass: share of the scores that stayed, None without scores."""

    sequence: int
    tokens: int
    mass: float | None


@dataclass(frozen=True)
class StepOutput:
    """The output of a step. Times in seconds; time that the step waited for copies is idle time, not compute time.

    windows: sequence -> tokens that its adaptive window is to have, if the step asked.
    tickets: the step's copies within the device. copied, failed: onloads that have ended since the previous output.
    block_times: seconds to copy a block from a lower tier to the device, as far as known.
    sampled: in the order of each sequence's tokens. num_drafts: drafted tokens among num_tokens.
    wanted_drafts: sequence -> drafted tokens that are worth their computation in its next step.
    """

    number: int
    sampled: tuple[SampledToken, ...]
    num_tokens: int
    compute_time: float
    idle_time: float
    tickets: tuple[int, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    windows: Mapping[int, int] = field(default_factory=dict)
    copied: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    block_times: Mapping[Tier, float] = field(default_factory=dict)
    num_drafts: int = 0
    wanted_drafts: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
