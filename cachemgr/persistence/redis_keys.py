"""The names of a cache manager's keys in Redis."""

from dataclasses import dataclass
from urllib.parse import quote

# The owner of keys that belong to no executor.
OPERATORS = ""


@dataclass(frozen=True)
class Keys:
    """The names of one cache manager's keys. shard: its name among managers that share a Redis; empty for none.

    In a cluster, all keys of an owner (an executor's id or OPERATORS) lie on one node.
    """

    shard: str = ""

    def executor(self, executor_id: str, what: str) -> str:
        """A key of one executor."""
        return self._key(quote(executor_id, safe=""), what)

    def operators(self, what: str) -> str:
        """A key that belongs to no executor."""
        return self._key("operators", what)

    def clock(self, owner: str) -> str:
        """The key of an owner's clock."""
        return self.operators("time") if owner == OPERATORS else self.executor(owner, "clock")

    def _key(self, owner: str, what: str) -> str:
        # No quoted id and no shard has a slash, so names of two shards are never equal.
        return f"kvkeep:{{{self.shard and f'{self.shard}/'}{owner}}}:{what}"
