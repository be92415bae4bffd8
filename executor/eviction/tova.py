"""What the newest token attends to (Oren et al. 2024, Transformers are Multi-State RNNs, section 3.2: TOVA)."""

from __future__ import annotations

from torch import Tensor

from executor.eviction.policy import Attention, Contents, Space
from executor.eviction.ranked import Ranked
from executor.eviction.scores import Sums
from protos.kvcommon.eviction import Policy


class LastQuery(Ranked):
    """Evicts what the last query attended to least, on average over all heads of a layer.

    Nothing has to follow an eviction: the next step's query takes the place of this one.
    """

    def __init__(self, policy: Policy, space: Space) -> None:
        super().__init__(policy, space)
        self._weights = Sums(space, 1)

    def observe(self, attention: Attention | None, new: int) -> None:
        """Forgets the query before."""
        del new
        self._weights.clear()
        if attention is not None:
            # The sum over heads is ordered as their mean is.
            self._weights.add(attention.weights.sum(1, keepdim=True))

    def scores(self, contents: Contents) -> Tensor:
        """[L, 1, T] float32."""
        return self._weights.values(contents.positions.shape[-1])

    def mass(self, index: Tensor) -> float | None:
        """Share of the last query's weights."""
        return self._weights.share(index)
