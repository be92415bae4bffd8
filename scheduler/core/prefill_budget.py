"""How many prompt tokens a step may compute beside decodes, and how long steps take.

Pure: no clock; the caller says how long steps took. All times are in seconds.
"""

import math
from collections import deque
from statistics import median

from scheduler.core.decode_times import DecodeTimes

# A single prefill may lengthen a step by this share of the duration of a step that only decodes.
DEFAULT_SHARE = 0.4
# A step that prefills computes at least this many tokens of prompts, even if they take too long, so that prompts always
# end. Fewer tokens would save little: three tokens read the same keys as one token. In a sequence of thousands of
# tokens, four tokens make a step 1.6 times as long.
MIN_TOKENS = 3
# Limit for a step, in seconds. Blocks become free only when all steps in flight have ended, which must take less than
# a second; two of these steps may be long. LEAST_CHUNK prompt tokens are computed even beyond the limit.
LONGEST_STEP, LEAST_CHUNK = 0.3, 32
# After this many steps with prefills, a step without them is due: the time of decodes changes with the running batch,
# and only a step without prefills shows it.
REFRESH_STEPS = 32
# Steps in a median: a single slow step (caused by another process, say) changes nothing.
_KEPT_DECODES, _KEPT_PREFILLS = 3, 5
# Steps in the mean of a step's whole time per prompt token: many, because a step's other work varies.
_KEPT_WHOLE_STEPS = 32
# A step with at least this many prompt tokens shows the cost of a long prefill. In smaller steps, other work takes as
# much time.
_MANY_TOKENS = 64


class PrefillBudget:
    """Bounds prompt tokens so that decoding sequences keep their inter-token latency.

    A positive `target_seconds` bounds the time between tokens. With 0, prefills may add a share of the time of a step
    that only decodes. The cost of a prompt token is learned from the last steps, not set for a machine.
    """

    def __init__(self, target_seconds: float = 0.0) -> None:
        self._target = target_seconds
        # Times of the last decode-only steps, each with about as many sequences as the step before it.
        self._decode_only: deque[float] = deque(maxlen=_KEPT_DECODES)
        # Number of sequences of the newest of these steps.
        self._sequences = 0
        self._decode_times = DecodeTimes()
        # For each of the last steps with prefills: its prompt tokens, and the time per prompt token beyond the decodes.
        self._prefills: deque[tuple[int, float]] = deque(maxlen=_KEPT_PREFILLS)
        # For each of the last steps with prefills: its prompt tokens, and its whole time.
        self._whole_steps: deque[tuple[int, float]] = deque(maxlen=_KEPT_WHOLE_STEPS)
        # The times per prompt token, beyond the decodes, of the last steps with many prompt tokens.
        self._long_prefills: deque[float] = deque(maxlen=_KEPT_PREFILLS)
        self._since_decode_only = 0
        # Median time of a prompt token beyond the decodes, over the last steps with prefills; 0 before the first.
        self._token_seconds = 0.0
        # The same over the last steps with at least _MANY_TOKENS prompt tokens; None before the first.
        self.prompt_token_seconds: float | None = None
        # Whole time of the last steps with prefills by their prompt tokens; None before the first.
        self.prefill_token_seconds: float | None = None
        # Time of the last steps that only decoded; None until it is measured.
        self.decode_step_seconds: float | None = None

    @property
    def sequence_seconds(self) -> float | None:
        """Time that one more sequence adds to a step that only decodes; None until it is measured."""
        return self._decode_times.sequence_seconds

    @property
    def has_target(self) -> bool:
        """Whether the bound is an inter-token latency, which holds for every sequence and prompt."""
        return self._target > 0

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Takes an answered step's number of decoding sequences, its prompt tokens, and its time on the device."""
        if prompt_tokens:
            self._observe_prefill(decodes, prompt_tokens, seconds)
        elif decodes:
            self._since_decode_only = 0
            if not self._resembles(decodes):
                self._decode_only.clear()
            self._sequences = decodes
            self._decode_only.append(seconds)
            self.decode_step_seconds = median(self._decode_only)
            self._decode_times.observe(decodes, seconds)

    def note_drafts(self) -> None:
        """Notes that a step with drafts was answered. The step's time measures neither decodes nor prefills.

        Contexts may have grown meanwhile, so a step that only decodes is due before the next prefill.
        """
        self._since_decode_only = REFRESH_STEPS

    def _observe_prefill(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        self._since_decode_only += 1
        each = max(0.0, seconds - self._decode_seconds(decodes)) / prompt_tokens
        self._prefills.append((prompt_tokens, each))
        self._token_seconds = median(seconds for _, seconds in self._prefills)
        if prompt_tokens >= _MANY_TOKENS:
            self._long_prefills.append(each)
            self.prompt_token_seconds = median(self._long_prefills) or None
        self._whole_steps.append((prompt_tokens, seconds))
        # Steps with many prompt tokens are preferred: the last few tokens of a prompt would give a much too long time.
        steps = [step for step in self._whole_steps if step[0] >= _MANY_TOKENS] or self._whole_steps
        self.prefill_token_seconds = sum(seconds for _, seconds in steps) / sum(tokens for tokens, _ in steps)

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """Returns the time of a step with these decodes and prompt tokens; infinite if nothing similar was seen."""
        if (decodes and not self._resembles(decodes)) or prompt_tokens > self._most_known:
            return math.inf
        return self._decode_seconds(decodes) + self._token_seconds * prompt_tokens or math.inf

    def estimate(self, decodes: int, prompt_tokens: int) -> float | None:
        """Like `seconds`, but extrapolates if nothing similar was seen; None before the first step."""
        if not self._decode_only and not self._prefills:
            return None
        return self._decode_seconds(decodes) + self._token_seconds * prompt_tokens

    def within_longest_step(self, decodes: int, tokens: int) -> int:
        """Returns how many of the prompt tokens keep a step with these decoding sequences within LONGEST_STEP.

        Returns up to LEAST_CHUNK tokens even if they take longer.
        """
        each = self._token_seconds
        left = max(0.0, LONGEST_STEP - self._decode_seconds(decodes))
        return tokens if each * tokens <= left else min(tokens, max(LEAST_CHUNK, int(left / each)))

    def max_prefill_tokens(self, decodes: int, older: int, waiting: int) -> int | None:
        """Returns the prompt tokens that the next step may compute: None for no bound, 0 for a step that only decodes.

        Returns 0 once after REFRESH_STEPS steps with prefills, and while no step that only decodes was answered since
        the number of sequences changed much.

        decodes: sequences that decode in the step. older: how many of these had a token before the first of the waiting
        prompts arrived. waiting: the prefills that the bound limits.
        """
        delayed = decodes if self._target else older
        if not delayed:
            # No decoding sequence had a token when the first of the waiting prompts arrived: a burst is not bounded.
            return None
        if not self._resembles(decodes):
            return 0
        if self._since_decode_only >= REFRESH_STEPS:
            # A single step is enough, however many are sent before it is answered.
            self._since_decode_only = 0
            return 0
        decode_only = self.decode_step_seconds
        if not decode_only:
            # The executor reports no times.
            return None
        # Each further prompt adds 1/older of the time of a decode-only step: many prompts may slow few sequences down.
        extra = self._target - decode_only if self._target else decode_only * (DEFAULT_SHARE + (waiting - 1) / older)
        if not self._prefills or extra <= 0:
            return MIN_TOKENS
        each = self._token_seconds
        most = self._most_known
        return max(MIN_TOKENS, most if each * most <= extra else int(extra / each))

    @property
    def _most_known(self) -> int:
        """Twice the most prompt tokens of the measured steps: few tokens say little about the cost of many."""
        return 2 * max((tokens for tokens, _ in self._prefills), default=0)

    def _decode_seconds(self, decodes: int) -> float:
        """Time of the decodes alone, as far as it is known."""
        return (decodes and self.decode_step_seconds) or 0.0

    def _resembles(self, decodes: int) -> bool:
        return self._sequences <= 2 * decodes and decodes <= 2 * self._sequences
