"""The metadata of one step's sequences, shared by all layers of a group."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Which query rows belong to which sequence, and where its keys are. Built once per step and group.

    query_start: [S + 1] int32, sequence s has the rows query_start[s] to query_start[s + 1]; none is fine.
    seq_lens: [S] int32, tokens in the cache, those of this step included.
    block_tables: [S, M] int32, block numbers; entries that no query can see are never read.
    max_query_len, max_seq_len: at least the largest of their kind (they bound the launch grid on CUDA).
    query_lens, host_seq_lens: the same lengths on the host, for the CPU path and its checks.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    query_lens: tuple[int, ...] = ()
    host_seq_lens: tuple[int, ...] = ()
    _derived: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build` returned the first time it was asked for `key`: later layers of the step reuse it."""
        if key not in self._derived:
            self._derived[key] = build()
        return cast(T, self._derived[key])
