"""An eviction policy as a request or a rule asks for it, with much left open."""

from __future__ import annotations

from typing import NamedTuple

from protos.kvcache.eviction import Layout, Policy, parse
from protos.kvcache.v1 import kvcache_pb2 as pb

# A policy that does not suit this layout suits no executor: every number is a multiple of its block size.
_ANY_LAYOUT = Layout(1, (None,), plain_rotary=True)


class EvictionPolicyRequest(NamedTuple):
    """An EvictionPolicy, encoded: equal messages are equal requests."""

    encoded: bytes

    @classmethod
    def of(cls, message: pb.EvictionPolicy) -> EvictionPolicyRequest:
        """A request from its message."""
        return cls(message.SerializeToString(deterministic=True))

    def message(self) -> pb.EvictionPolicy:
        """The request as its message."""
        return pb.EvictionPolicy.FromString(self.encoded)

    def policy(self, layout: Layout, field: str) -> Policy | None:
        """The policy with nothing open; None to keep everything. Raises InvalidField with a path below `field`."""
        return parse(self.message(), layout, field)

    def check(self, field: str) -> None:
        """Raises InvalidField for a policy that suits no executor; an admission checks it against its executor."""
        self.policy(_ANY_LAYOUT, field)
