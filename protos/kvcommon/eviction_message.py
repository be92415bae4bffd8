"""Eviction policies as messages: as a request or rule has them, and with all defaults filled in."""

from __future__ import annotations

from typing import NamedTuple

from protos.kvcommon.eviction import WITH_SCORE_WINDOW, Kind, Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common

# A policy that does not suit this layout suits no executor, since every number is a multiple of a block size of 1.
_ANY_LAYOUT = Layout(1, (None,), plain_rotary=True)


class EvictionPolicyRequest(NamedTuple):
    """An encoded EvictionPolicy; equal messages are equal requests."""

    encoded: bytes

    @classmethod
    def of(cls, message: common.EvictionPolicy) -> EvictionPolicyRequest:
        """Converts a message to a request."""
        return cls(message.SerializeToString(deterministic=True))

    def message(self) -> common.EvictionPolicy:
        """Converts the request to its message."""
        return common.EvictionPolicy.FromString(self.encoded)

    def policy(self, layout: Layout, field: str) -> Policy | None:
        """The policy with all values set; None to keep everything. Raises InvalidField with a path below `field`."""
        return parse(self.message(), layout, field)

    def check(self, field: str) -> None:
        """Raises InvalidField for a policy that suits no executor; an admission checks it against its executor."""
        self.policy(_ANY_LAYOUT, field)


def message_of(policy: Policy) -> common.EvictionPolicy:
    """The message of a policy, with only the fields that its kind uses."""
    bounds = policy.bounds
    message = common.EvictionPolicy(
        kind=f"EVICTION_KIND_{policy.kind.name}",
        start_tokens=policy.start,
        recent_tokens=policy.recent if bounds is None else bounds.least,
        max_cache_tokens=policy.maximum if bounds is None else policy.start + bounds.most,
        during_prefill=policy.during_prefill,
        positions=f"EVICTION_POSITIONS_{'COMPACTED' if policy.compacted else 'ABSOLUTE'}",
        seed=policy.seed,
    )
    if not policy.by_block and policy.kind is not Kind.LAST:
        message.period_tokens = policy.period
    if policy.kind in WITH_SCORE_WINDOW:
        message.score_window_tokens = policy.score_window
    if policy.kind is Kind.ADAPTIVE_RKV:
        message.adaptive_rkv.attention_mass = policy.mass
        message.adaptive_rkv.window_steps = policy.mass_steps
    if bounds is not None:
        message.attention_mass = policy.mass
    if policy.crush is not None:
        anchor = f"KV_CRUSH_ANCHOR_{policy.crush.anchor.name}"
        message.kvcrush.CopyFrom(common.KvCrush(budget_blocks=policy.crush.budget, anchor=anchor))
    return message
