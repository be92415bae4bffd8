"""Lengths of sequences under a policy of token eviction, for admission, planning and eviction alike.

A sequence has three lengths that are never mixed: computed tokens, evicted tokens, and kept tokens, which is how many
slots it uses.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from protos.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protos.kvcommon.v1 import kvcommon_pb2 as pb


class Kind(enum.IntEnum):
    """Numbers as in EvictionKind of the messages."""

    NONE = 1
    SLIDING_WINDOW = 2
    SUM = 3
    NORM_SUM = 4
    ADAPTIVE_RKV = 5
    SNAPKV = 6
    H2O = 7
    TOVA = 8
    ROCO = 9
    AVERAGE = 10
    KEYDIFF = 11
    KNORM = 12
    LAST = 13
    RANDOM = 14
    ADAPTIVE_WINDOW = 15
    H2O_TOVA = 16


class Anchor(enum.IntEnum):
    """Numbers as in KvCrushAnchor of the messages."""

    RANDOM = 1
    ZEROS = 2
    ONES = 3
    ALTERNATING = 4
    MEAN = 5


# Kinds that evict whole blocks between a start and a recent area, separately in each layer.
AREAS = (Kind.SUM, Kind.NORM_SUM, Kind.ADAPTIVE_RKV)
# Kinds that only count the attention of a prompt's last tokens.
WITH_SCORE_WINDOW = (*AREAS, Kind.SNAPKV, Kind.ADAPTIVE_WINDOW)
# Kinds that keep the first and the last tokens.
WINDOWS = (Kind.SLIDING_WINDOW, Kind.ADAPTIVE_WINDOW)
# Kinds that wait for the end of the prompt.
AFTER_PREFILL = (*AREAS, Kind.SNAPKV, Kind.LAST, Kind.ADAPTIVE_WINDOW, Kind.H2O_TOVA)
# Kinds that never look at attention.
SCORELESS = (Kind.SLIDING_WINDOW, Kind.KEYDIFF, Kind.KNORM, Kind.LAST, Kind.RANDOM)
# (start, recent, maximum, period); a period of None is a block. A window of 512 tokens has no separate maximum.
_DEFAULTS: dict[Kind, tuple[int, int, int, int | None]] = {
    Kind.SLIDING_WINDOW: (0, 512, 512, 1),
    **dict.fromkeys(AREAS, (32, 128, 672, None)),
    Kind.SNAPKV: (0, 8, 672, 1),
    Kind.H2O: (0, 336, 672, 16),
    **dict.fromkeys((Kind.TOVA, Kind.ROCO, Kind.KEYDIFF, Kind.KNORM, Kind.RANDOM, Kind.H2O_TOVA), (4, 32, 672, 16)),
    Kind.AVERAGE: (0, 0, 672, 64),
    Kind.LAST: (0, 1, 64, 63),
    Kind.ADAPTIVE_WINDOW: (32, 128, 672, None),
}
# The period of a window that evicts while the prompt is computed, where a step computes no more tokens than a period.
# Also of a window with compacted positions, where each eviction rotates the kept keys and rounds them once more.
_LONG_PERIOD = 64
# How many queries at a prompt's end decide the length of an adaptive window, if the message does not say.
_WINDOW_ROWS = 16
_MAX_TOKENS = 1 << 24
_MAX_STEPS = 1024
MIN_LAST = 2
# A value of EvictionPositions.
_COMPACTED = 2


@dataclass(frozen=True)
class KvCrush:
    """The settings for blocks that are kept because they differ from the others."""

    budget: int
    anchor: Anchor


@dataclass(frozen=True)
class WindowBounds:
    """Tokens of the shortest and the longest adaptive window. A sequence is admitted with the shortest."""

    least: int
    most: int


@dataclass(frozen=True)
class Layout:
    """What decides which policies an executor supports. windows: one per layer group, None for full attention.

    plain_rotary: whether keys can be rotated to other positions.
    """

    block_size: int
    windows: Sequence[int | None]
    plain_rotary: bool


@dataclass(frozen=True)
class Policy:
    """A policy with all values set. All numbers except mass and seed are tokens, steps or blocks.

    bounds: of an adaptive window, whose present length gives `recent` and `maximum`; None for other kinds.
    """

    kind: Kind
    block_size: int
    start: int
    recent: int
    maximum: int
    period: int
    during_prefill: bool
    compacted: bool
    score_window: int
    mass: float
    mass_steps: int
    crush: KvCrush | None
    seed: int
    bounds: WindowBounds | None = None

    @property
    def uses_scores(self) -> bool:
        """Whether the policy looks at attention."""
        return self.kind not in SCORELESS

    @property
    def by_block(self) -> bool:
        """Whether the policy evicts whole blocks."""
        return self.kind in AREAS

    @property
    def most_kept(self) -> int | None:
        """The limit on a sequence's slots once it evicts, including a step's new tokens; None for no limit."""
        if self.kind is Kind.SNAPKV:
            return None
        if self.by_block:
            return self._floor + self.block_size
        return self.maximum + self.period if self.kind in WINDOWS else self.maximum

    @property
    def window(self) -> int:
        """For kinds that keep a window: its present length, without the first tokens."""
        return self.maximum - self.start

    def with_window(self, tokens: int) -> Policy:
        """Returns the policy with an adaptive window of a different length."""
        return replace(self, recent=tokens, maximum=self.start + tokens)

    def allows_window(self, tokens: int) -> bool:
        """Whether the policy's window is adaptive and may have this length."""
        bounds = self.bounds
        return bounds is not None and bounds.least <= tokens <= bounds.most and tokens % self.period == 0

    def looks(self, kept: int, computed: int, prompt: int) -> bool:
        """Whether the attention up to a step decides the length that an adaptive window gets at its next eviction.

        This is half a period before the eviction, which leaves time to ask for blocks. If the prompt is longer, this is
        the prompt's last step. kept, computed: the lengths after the step.
        """
        look = self._look
        if look is None or computed < prompt:
            return False
        return kept == look or (computed == prompt and kept > look)

    @property
    def _look(self) -> int | None:
        return None if self.bounds is None else self.maximum + self.period - self.period // 2

    @property
    def _floor(self) -> int:
        """With areas: tokens that an eviction leaves, without the tokens of the last block."""
        return self.maximum + (self.crush.budget * self.block_size if self.crush else 0)

    def kept_after(self, kept: int, computed: int, prompt: int) -> int:
        """Tokens that stay, of `kept` tokens, when the sequence is about to compute more.

        computed: tokens computed so far. prompt: tokens of the request's prompt. After a second admission, generated
        tokens are computed again like the first time.
        """
        if computed < prompt and not self.during_prefill:
            return kept
        if self.by_block:
            return kept if kept < self._floor + self.block_size else self._floor + kept % self.block_size
        match self.kind:
            case Kind.SLIDING_WINDOW | Kind.ADAPTIVE_WINDOW:
                return self.maximum if kept >= self.maximum + self.period else kept
            case Kind.SNAPKV:
                return min(kept, self.maximum) if computed == prompt else kept
            case Kind.LAST:
                return min(kept, 1) if computed == prompt or kept >= self.maximum else kept
            case _:
                return self.maximum - self.period if kept >= self.maximum else kept

    def room(self, kept: int, computed: int, prompt: int) -> int | None:
        """Tokens that may be computed before the policy must be asked again; None for no limit."""
        if computed < prompt and not self.during_prefill:
            left = prompt - computed
            # The prompt's last query counts alone, so it has a separate step.
            return left - 1 if self.kind is Kind.H2O_TOVA and left > 1 else left
        if self._look is not None and kept < self._look:
            return self._look - kept
        return None if self.most_kept is None else self.most_kept - kept

    def first_eviction(self, prompt: int) -> int | None:
        """The number of computed tokens at which a sequence first evicts; None if it never does."""
        if not self.during_prefill and self.kept_after(prompt, prompt, prompt) < prompt:
            return prompt
        return self.most_kept

    def clean_tokens(self, known: int, prompt: int) -> int:
        """How many of the known tokens are computed before any is evicted. prompt: how many belong to the prompt."""
        first = self.first_eviction(prompt)
        return known if first is None else min(known, first)

    def reusable(self, known: int, prompt: int) -> int:
        """How many of the known tokens may come from the cache.

        The queries whose attention counts must be computed. So must the last token before an eviction, since no
        sequence evicts in the step in which it joins.
        """
        most = max(0, self.clean_tokens(known, prompt) - 1)
        return most if self.kind in SCORELESS else min(max(0, prompt - self.counted_rows(prompt)), most)

    def counted_rows(self, prompt: int) -> int:
        """How many of a prompt's last queries count."""
        if self.kind is Kind.TOVA:
            return 1
        return min(prompt, self.score_window) if self.score_window else prompt


def parse(message: pb.EvictionPolicy, layout: Layout, field: str = "eviction_policy") -> Policy | None:
    """Converts a message to a policy; None for a message that says to keep everything.

    Raises InvalidField with the path of the wrong field.
    """
    return None if int(message.kind) == Kind.NONE else _Reader(message, layout, field).policy()


class _Reader:
    """Reads one message, and makes a policy or refuses the message."""

    def __init__(self, message: pb.EvictionPolicy, layout: Layout, field: str) -> None:
        self._message = message
        self._layout = layout
        self._field = field
        if int(message.kind) not in list(Kind):
            raise self._invalid("kind", "must be one of the EvictionKinds")
        self._kind = Kind(message.kind)
        start, recent, maximum, period = _DEFAULTS[self._kind]
        self._maximum = self._given("max_cache_tokens", maximum)
        if self._kind is Kind.H2O:
            recent = self._maximum // 2
        elif self._kind is Kind.SNAPKV and message.score_window_tokens:
            recent = message.score_window_tokens
        elif self._kind is Kind.LAST:
            period = self._maximum - 1
        elif self._kind is Kind.SLIDING_WINDOW and (message.during_prefill or message.positions == _COMPACTED):
            period = _LONG_PERIOD
        self._start = self._given("start_tokens", start)
        self._recent = self._given("recent_tokens", recent)
        if self._kind is Kind.SLIDING_WINDOW:
            self._maximum = self._given("max_cache_tokens", self._start + self._recent)
        self._period = self._given("period_tokens", layout.block_size if period is None else period)

    def policy(self) -> Policy:
        """Makes the policy. Raises InvalidField."""
        if tuple(self._layout.windows) != (None,):
            raise self._invalid("kind", "cannot be used: the model has layers that attend to a window of tokens only")
        self._check_sizes()
        if self._kind in AREAS:
            self._check_areas()
        elif self._kind is Kind.SLIDING_WINDOW:
            self._check_window()
        elif self._kind is Kind.ADAPTIVE_WINDOW:
            self._check_adaptive_window()
        elif self._kind is Kind.LAST:
            self._check_last()
        else:
            self._check_tokens()
        self._check_uses()
        bounds = None
        if self._kind is Kind.ADAPTIVE_WINDOW:
            bounds = WindowBounds(self._recent, self._maximum - self._start)
        return Policy(
            kind=self._kind,
            block_size=self._layout.block_size,
            start=self._start,
            recent=self._recent,
            maximum=self._maximum if bounds is None else self._start + bounds.least,
            period=self._period,
            during_prefill=self._message.during_prefill,
            compacted=self._message.positions == _COMPACTED,
            score_window=self._score_window(),
            mass=self._mass(),
            mass_steps=self._mass_steps(),
            crush=self._crush(),
            seed=self._message.seed,
            bounds=bounds,
        )

    def _given(self, name: str, otherwise: int) -> int:
        value: int = getattr(self._message, name)
        return value if self._message.HasField(name) else otherwise

    def _invalid(self, name: str, text: str) -> InvalidField:
        return InvalidField(f"{self._field}.{name}", text)

    def _check_sizes(self) -> None:
        for name in ("start_tokens", "recent_tokens", "max_cache_tokens", "period_tokens"):
            if getattr(self._message, name) > _MAX_TOKENS:
                raise self._invalid(name, f"must be at most {_MAX_TOKENS}")

    def _check_areas(self) -> None:
        size = self._layout.block_size
        for name, value in (
            ("start_tokens", self._start),
            ("recent_tokens", self._recent),
            ("max_cache_tokens", self._maximum),
        ):
            if not value or value % size:
                raise self._invalid(name, f"must be a multiple of the block size, {size}, and not 0")
        if self._maximum <= self._start + self._recent:
            raise self._invalid(
                "max_cache_tokens", f"must be more than start_tokens + recent_tokens, {self._start + self._recent}"
            )

    def _check_window(self) -> None:
        if not self._recent:
            raise self._invalid("recent_tokens", "must not be 0: it is the window")
        if self._maximum != self._start + self._recent:
            kept = self._start + self._recent
            raise self._invalid("max_cache_tokens", f"must be absent, or start_tokens + recent_tokens, {kept}")
        if not self._period:
            raise self._invalid("period_tokens", "must be at least 1")

    def _check_adaptive_window(self) -> None:
        size, period = self._layout.block_size, self._period
        if not period or period % size:
            raise self._invalid("period_tokens", f"must be a multiple of the block size, {size}, and not 0")
        if not self._recent or self._recent % period:
            raise self._invalid("recent_tokens", f"must be a multiple of period_tokens, {period}, and not 0")
        longest = self._maximum - self._start
        if longest < self._recent or longest % period:
            least = self._start + self._recent
            raise self._invalid("max_cache_tokens", f"must be {least} plus a multiple of {period} (period_tokens)")

    def _check_last(self) -> None:
        if self._maximum < MIN_LAST:
            raise self._invalid("max_cache_tokens", f"must be at least {MIN_LAST}")
        if (self._start, self._recent, self._period) != (0, 1, self._maximum - 1):
            text = "takes neither start_tokens, recent_tokens nor period_tokens: it keeps one token"
            raise self._invalid("kind", text)

    def _check_tokens(self) -> None:
        if not 1 <= self._period < self._maximum:
            raise self._invalid("period_tokens", f"must be at least 1 and less than max_cache_tokens, {self._maximum}")
        kept = self._maximum if self._kind is Kind.SNAPKV else self._maximum - self._period
        if kept < self._start + self._recent:
            text = f"leaves {kept} tokens, less than start_tokens and recent_tokens together"
            raise self._invalid("max_cache_tokens", text)

    def _check_uses(self) -> None:
        """Refuses fields that the kind does not use."""
        if self._message.during_prefill and self._kind in AFTER_PREFILL:
            raise self._invalid("during_prefill", "cannot be used with this kind, which waits for the prompt")
        if self._kind in AREAS and self._message.HasField("period_tokens"):
            raise self._invalid("period_tokens", "cannot be used with this kind, which evicts whole blocks")
        for name, kinds in (
            ("score_window_tokens", WITH_SCORE_WINDOW),
            ("adaptive_rkv", (Kind.ADAPTIVE_RKV,)),
            ("attention_mass", (Kind.ADAPTIVE_WINDOW,)),
            ("kvcrush", (Kind.SUM, Kind.NORM_SUM)),
        ):
            if self._message.HasField(name) and self._kind not in kinds:
                raise self._invalid(name, "cannot be used with this kind")
        if self._message.positions not in (0, 1, _COMPACTED):
            raise self._invalid("positions", "must be one of the EvictionPositions")
        if self._message.positions == _COMPACTED and not self._layout.plain_rotary:
            raise self._invalid("positions", "cannot be compacted: the model has no plain rotary embedding")

    def _score_window(self) -> int:
        if self._kind not in WITH_SCORE_WINDOW:
            return 0
        window = self._given("score_window_tokens", _WINDOW_ROWS if self._kind is Kind.ADAPTIVE_WINDOW else 8)
        if self._kind is Kind.SNAPKV and not 1 <= window <= self._recent:
            raise self._invalid("score_window_tokens", f"must be from 1 to recent_tokens, {self._recent}")
        return window

    def _mass(self) -> float:
        message: pb.EvictionPolicy | pb.AdaptiveRkv = self._message
        field, mass = "attention_mass", 0.97
        if self._kind is not Kind.ADAPTIVE_WINDOW:
            message, field, mass = self._message.adaptive_rkv, "adaptive_rkv.attention_mass", 0.9
        if message.HasField("attention_mass"):
            mass = message.attention_mass
        if not 0 < mass <= 1:
            raise self._invalid(field, "must be greater than 0 and at most 1")
        return mass

    def _mass_steps(self) -> int:
        settings = self._message.adaptive_rkv
        steps: int = settings.window_steps if settings.HasField("window_steps") else 8
        if not 1 <= steps <= _MAX_STEPS:
            raise self._invalid("adaptive_rkv.window_steps", f"must be from 1 to {_MAX_STEPS}")
        return steps

    def _crush(self) -> KvCrush | None:
        if not self._message.HasField("kvcrush"):
            return None
        settings = self._message.kvcrush
        if not 1 <= settings.budget_blocks <= _MAX_TOKENS:
            raise self._invalid("kvcrush.budget_blocks", f"must be from 1 to {_MAX_TOKENS}")
        if settings.anchor not in (0, *Anchor):
            raise self._invalid("kvcrush.anchor", "must be one of the KvCrushAnchors")
        return KvCrush(settings.budget_blocks, Anchor(settings.anchor or Anchor.RANDOM))
