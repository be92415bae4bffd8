"""Which class carries out which kind of policy."""

from __future__ import annotations

from executor.eviction.adaptive_rkv import AdaptiveRkv
from executor.eviction.areas import Areas
from executor.eviction.average import AverageAttention
from executor.eviction.h2o import HeavyHitters
from executor.eviction.keydiff import DistinctKeys
from executor.eviction.knorm import ShortKeys
from executor.eviction.last import Last
from executor.eviction.policy import Evictor, Space
from executor.eviction.random_choice import AnyTokens
from executor.eviction.roco import VaryingAttention
from executor.eviction.snapkv import PromptEnd
from executor.eviction.tova import LastQuery
from executor.eviction.window import SlidingWindow
from protos.kvcommon.eviction import Kind, Policy

_EVICTORS: dict[Kind, type[Evictor]] = {
    Kind.SLIDING_WINDOW: SlidingWindow,
    Kind.SUM: Areas,
    Kind.NORM_SUM: Areas,
    Kind.ADAPTIVE_RKV: AdaptiveRkv,
    Kind.SNAPKV: PromptEnd,
    Kind.H2O: HeavyHitters,
    Kind.TOVA: LastQuery,
    Kind.ROCO: VaryingAttention,
    Kind.AVERAGE: AverageAttention,
    Kind.KEYDIFF: DistinctKeys,
    Kind.KNORM: ShortKeys,
    Kind.LAST: Last,
    Kind.RANDOM: AnyTokens,
}


def evictor(policy: Policy, space: Space) -> Evictor:
    """A new sequence's."""
    return _EVICTORS[policy.kind](policy, space)
