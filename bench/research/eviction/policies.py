"""The policies under comparison, each configured for a given budget of kept tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protos.kvcommon.eviction import Kind, Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common

FULL = "full cache"
# Tokens of the first block, which always stay unless the policy itself says otherwise.
_START = 16
# Policies that evict single tokens evict this number at a time.
_PERIOD = 16
_SINKS = 4


def _recent(budget: int) -> int:
    """A quarter of the budget, in whole blocks."""
    return max(16, budget // 4 // 16 * 16)


def _random(budget: int) -> dict[str, Any]:
    return _tokens(Kind.RANDOM, budget) | {"start_tokens": 0, "recent_tokens": 0}


def _window(sinks: int) -> Callable[[int], dict[str, Any]]:
    def fields(budget: int) -> dict[str, Any]:
        return {"kind": Kind.SLIDING_WINDOW.value, "start_tokens": sinks, "recent_tokens": budget - sinks}

    return fields


def _blocks(kind: Kind, rows: int = 8) -> Callable[[int], dict[str, Any]]:
    """rows: how many of the prompt's last queries count; 0 for all."""

    def fields(budget: int) -> dict[str, Any]:
        sizes = {"start_tokens": _START, "recent_tokens": _recent(budget), "max_cache_tokens": budget}
        return {"kind": kind.value, **sizes, "score_window_tokens": rows}

    return fields


def _crushed(budget: int) -> dict[str, Any]:
    """Reserves a quarter of the budget for blocks that KVCrush keeps beyond the policy's own limit."""
    spared = max(1, budget // 64)
    return _blocks(Kind.NORM_SUM)(budget) | {
        "max_cache_tokens": budget - 16 * spared,
        "recent_tokens": max(16, _recent(budget) // 2 // 16 * 16),
        "kvcrush": common.KvCrush(budget_blocks=spared),
    }


def _snapkv(budget: int) -> dict[str, Any]:
    return {"kind": Kind.SNAPKV.value, "max_cache_tokens": budget}


def _tokens(kind: Kind, budget: int) -> dict[str, Any]:
    """Policies of single tokens: after each eviction of a period of tokens, `budget` tokens remain."""
    return {"kind": kind.value, "max_cache_tokens": budget + _PERIOD, "period_tokens": _PERIOD}


def _between(kind: Kind) -> Callable[[int], dict[str, Any]]:
    def fields(budget: int) -> dict[str, Any]:
        return _tokens(kind, budget) | {"start_tokens": _START, "recent_tokens": _recent(budget)}

    return fields


def _heavy(budget: int) -> dict[str, Any]:
    """As in the paper: half of the budget is for recent tokens, and there is no start area."""
    return _tokens(Kind.H2O, budget) | {"start_tokens": 0, "recent_tokens": budget // 2}


def _average(budget: int) -> dict[str, Any]:
    """As in the paper: no token is exempt."""
    return _tokens(Kind.AVERAGE, budget) | {"start_tokens": 0, "recent_tokens": 0}


RANDOM, WINDOW, SINKS = "random", "window", "window, 4 sinks"
POLICIES: dict[str, Callable[[int], dict[str, Any]]] = {
    RANDOM: _random,
    "random, areas": _between(Kind.RANDOM),
    WINDOW: _window(0),
    SINKS: _window(_SINKS),
    "SUM": _blocks(Kind.SUM),
    "NORM_SUM": _blocks(Kind.NORM_SUM),
    "SUM, all queries": _blocks(Kind.SUM, 0),
    "NORM_SUM, all queries": _blocks(Kind.NORM_SUM, 0),
    "ADAPTIVE_RKV": _blocks(Kind.ADAPTIVE_RKV),
    "KVCrush": _crushed,
    "SNAPKV": _snapkv,
    "H2O": _heavy,
    "TOVA": _between(Kind.TOVA),
    "ROCO": _between(Kind.ROCO),
    "H2O_TOVA": _between(Kind.H2O_TOVA),
    "AVERAGE": _average,
    "KEYDIFF": _between(Kind.KEYDIFF),
    "KNORM": _between(Kind.KNORM),
}


def policy(name: str, budget: int, layout: Layout, seed: int = 1) -> Policy:
    """One of POLICIES with `budget` tokens to keep. seed: for policies that choose at random."""
    chosen = parse(common.EvictionPolicy(**POLICIES[name](budget) | {"seed": seed}), layout)
    assert chosen is not None
    return chosen
