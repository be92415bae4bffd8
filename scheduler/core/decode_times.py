"""How much each sequence adds to the duration of a step that decodes.

Pure: no clock; the caller says how long steps took. All times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median

# Sizes of the running batch that are kept, and times kept of each: neither a single slow step (caused by another
# process, say) nor a size that was not seen for long changes the result.
_KEPT_SIZES, _KEPT_TIMES = 16, 5
# Sizes are rounded down, by less than an eighth.
_SHARES = 8


class DecodeTimes:
    """Times of the last steps that only decoded, by the number of their sequences."""

    def __init__(self) -> None:
        self._times: OrderedDict[int, deque[float]] = OrderedDict()
        # The median time of each size, kept because each of a thousand steps per second changes only one of them.
        self._medians: dict[int, float] = {}
        self._slope: float | None = None

    @property
    def sequence_seconds(self) -> float | None:
        """Seconds that one more sequence adds to a step; None until steps of different sizes have been seen."""
        return self._slope

    def observe(self, sequences: int, seconds: float) -> None:
        """Takes the time of a step that decoded this number of sequences and did nothing else."""
        size = _rounded(sequences)
        times = self._times.setdefault(size, deque(maxlen=_KEPT_TIMES))
        times.append(seconds)
        self._medians[size] = median(times)
        self._times.move_to_end(size)
        if len(self._times) > _KEPT_SIZES:
            oldest, _ = self._times.popitem(last=False)
            del self._medians[oldest]
        self._slope = self._fitted()

    def _fitted(self) -> float | None:
        """Returns the slope of the least-squares line through the medians of all sizes."""
        times = self._medians
        if len(times) < 2:
            return None
        middle, mean = sum(times) / len(times), sum(times.values()) / len(times)
        spread = sum((size - middle) ** 2 for size in times)
        return max(0.0, sum((size - middle) * (seconds - mean) for size, seconds in times.items()) / spread)


def _rounded(sequences: int) -> int:
    step = max(1, (1 << sequences.bit_length() - 1) // _SHARES)
    return sequences // step * step
