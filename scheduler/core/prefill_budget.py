"""How many prompt tokens a step may compute beside sequences that decode, and what steps take.

Pure: no clock, told what steps took.
"""

import math
from collections import deque
from statistics import median

# Of the time of a step that only decodes: how much more a single prompt may take.
DEFAULT_SHARE = 0.4
# Tokens that a prompt gets even when that is too slow, so that it always comes to its end. Fewer save little, as the
# keys before them are read for one token as for three; behind thousands of others four make a step 1.6 times as long.
MIN_TOKENS = 3
# No step shall take longer, in seconds, whoever waits: the blocks of somebody who leaves are free when all steps under
# way are over, of which two may be long, and that is to be within a second. So many prompt tokens are computed all the
# same.
LONGEST_STEP, LEAST_CHUNK = 0.3, 32
# Steps with prompts after which one without is due: what decoding alone takes changes with who decodes, and nothing
# but such a step shows it.
REFRESH_STEPS = 32
# A median over these many steps: a single slow one, as another process causes it, moves nothing.
_KEPT_DECODING, _KEPT_PROMPTS = 3, 5
# Prompt tokens of a step that say what a prompt takes as a whole: with few of them the rest of the step counts as much.
_MANY_TOKENS = 64


class Pace:
    """Bounds prompt tokens so that streams keep their time between tokens.

    The bound is a time: `target_seconds` between tokens, or with 0 a share of what decoding alone takes. What a prompt
    token costs is learned from the last steps, so nothing here depends on the speed of the machine.
    """

    def __init__(self, target_seconds: float = 0.0) -> None:
        self._target = target_seconds
        # Seconds of steps that only decoded about as many sequences as the last of them, and how many that had.
        self._alone: deque[float] = deque(maxlen=_KEPT_DECODING)
        self._sequences = 0
        # Of steps with prompts: their prompt tokens, and the seconds that each of these took beyond decoding.
        self._prompts: deque[tuple[int, float]] = deque(maxlen=_KEPT_PROMPTS)
        # The same of steps with many of them.
        self._bulk: deque[float] = deque(maxlen=_KEPT_PROMPTS)
        self._since_alone = 0

    @property
    def prompt_token_seconds(self) -> float | None:
        """What a token of a long prompt takes; None while that is not known."""
        return (median(self._bulk) or None) if self._bulk else None

    @property
    def has_target(self) -> bool:
        """Whether the bound is a time between tokens, which holds for every stream and prompt."""
        return self._target > 0

    def observe(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step has been answered: how many sequences decoded in it, its other tokens, and its time on the device."""
        if prompt_tokens:
            self._since_alone += 1
            each = max(0.0, seconds - self._decoding_seconds(decoding)) / prompt_tokens
            self._prompts.append((prompt_tokens, each))
            if prompt_tokens >= _MANY_TOKENS:
                self._bulk.append(each)
        elif decoding:
            self._since_alone = 0
            if not self._resembles(decoding):
                self._alone.clear()
            self._sequences = decoding
            self._alone.append(seconds)

    def seconds(self, decoding: int, prompt_tokens: int) -> float:
        """What a step of so many sequences that decode and other tokens takes; infinite while that is not known."""
        if (decoding and not self._resembles(decoding)) or prompt_tokens > self._most_known:
            return math.inf
        return self._decoding_seconds(decoding) + self._token_seconds() * prompt_tokens or math.inf

    def estimate(self, decoding: int, prompt_tokens: int) -> float | None:
        """As `seconds`, but a guess beyond what was measured; None while nothing was."""
        if not self._alone and not self._prompts:
            return None
        return self._decoding_seconds(decoding) + self._token_seconds() * prompt_tokens

    def bounded(self, decoding: int, tokens: int) -> int:
        """Of so many prompt tokens those that do not make a step a long one, beside so many sequences that decode."""
        each = self._token_seconds()
        left = max(0.0, LONGEST_STEP - self._decoding_seconds(decoding))
        return tokens if each * tokens <= left else min(tokens, max(LEAST_CHUNK, int(left / each)))

    def tokens(self, decoding: int, older: int, waiting: int) -> int | None:
        """Prompt tokens that the next step may compute; None is no bound, 0 is a step that shows what decoding takes.

        Asked once per step.

        decoding: sequences that decode in the step. older: of these, who had their first token when the first of the
        waiting prompts arrived. waiting: sequences with a prompt to compute.
        """
        disturbed = decoding if self._target else older
        if not disturbed:
            # Prompts that came before every stream's first token owe nobody anything: a burst runs at full speed.
            return None
        if not self._resembles(decoding):
            return 0
        if self._since_alone >= REFRESH_STEPS:
            # One is enough, however many are sent before it is answered.
            self._since_alone = 0
            return 0
        alone = median(self._alone)
        if alone <= 0:
            # An executor that tells no times cannot be paced.
            return None
        # Each prompt behind the first claims what one stream has: many may slow a few streams down.
        extra = self._target - alone if self._target else alone * (DEFAULT_SHARE + (waiting - 1) / older)
        if not self._prompts or extra <= 0:
            return MIN_TOKENS
        each = self._token_seconds()
        most = self._most_known
        return max(MIN_TOKENS, most if each * most <= extra else int(extra / each))

    @property
    def _most_known(self) -> int:
        """Never far beyond what has been measured: few tokens say little about the cost of many."""
        return 2 * max((tokens for tokens, _ in self._prompts), default=0)

    def _decoding_seconds(self, decoding: int) -> float:
        """What decoding alone takes, as far as that is known."""
        return median(self._alone) if decoding and self._alone else 0.0

    def _token_seconds(self) -> float:
        """What a prompt token took in the last steps that had any; 0 before them."""
        return median(seconds for _, seconds in self._prompts) if self._prompts else 0.0

    def _resembles(self, decoding: int) -> bool:
        return self._sequences <= 2 * decoding and decoding <= 2 * self._sequences
