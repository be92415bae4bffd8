"""Nothing crosses from one salt or adapter to another, on any path; what belongs together is always found.

Every probe comes in a pair: the same question under the scope that owns the tokens, which must hit, and under
another scope, which must not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.conformance.backends import ObjectBackend
from tests.conformance.player import EXECUTOR, Player

PROBES = 10_000
BLOCK, PROMPT = 4, 11
POOL_ID = f"{EXECUTOR}/0"
SALTS = (None, "0", "1", "none", "a", "A", "a ", "salt/a", "\x00", "\u00e4")
ADAPTERS = (None, 0, 1, 2**63)
Scope = tuple[str | None, int | None]
SCOPES: tuple[Scope, ...] = tuple((salt, adapter) for salt in SALTS for adapter in ADAPTERS)
# Enough for all on the device, or in the host.
DEVICE, HOST = {"num_blocks": 400}, {"num_blocks": 16, "host_blocks": 400}


@dataclass
class House:
    """A manager in which each scope has cached and runs a different prompt."""

    player: Player
    random: Random
    prompts: dict[Scope, list[int]]
    probes: int = 0

    @property
    def backend(self) -> ObjectBackend:
        assert isinstance(self.player.backend, ObjectBackend)
        return self.player.backend

    def call(self, method: str, request: Any) -> Any:
        return self.backend.call(method, request)

    def admit(self, scope: Scope, tokens: list[int]) -> tuple[str, pb.AdmitSequenceResponse]:
        self.probes += 1
        name = f"probe {self.probes}"
        answer = self.player.add(name, tokens, **options(scope))
        assert answer.admitted
        return name, answer

    def stranger(self, owner: Scope) -> Scope:
        """A scope that must not see the owner's blocks: another salt, another adapter, or both."""
        salt = self.random.choice([salt for salt in SALTS if salt != owner[0]])
        adapter = self.random.choice([adapter for adapter in ADAPTERS if adapter != owner[1]])
        return self.random.choice([(salt, owner[1]), (owner[0], adapter), (salt, adapter)])


def options(scope: Scope) -> dict[str, Any]:
    return {name: value for name, value in zip(("salt", "adapter_id"), scope, strict=True) if value is not None}


def build(folder: Path, pool: dict[str, int], *, running: bool = False) -> House:
    backend = ObjectBackend({}, lambda: 100.0, folder)
    spec = pb.PoolSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_bytes=256, **pool)
    house = House(Player(backend, BLOCK, [spec]), Random(20), {})
    for index, scope in enumerate(SCOPES):
        # The first token is the scope's own: every prefix hit comes from there.
        prompt = house.prompts[scope] = [1000 + index, *(house.random.randrange(3) for _ in range(PROMPT - 1))]
        house.player.add(f"cached {index}", prompt, **options(scope))
        house.player.release(f"cached {index}")
        if running:
            house.player.add(f"running {index}", prompt, **options(scope))
    return house


# Questions: does this scope hit the owner's blocks?


def look_up(house: House, scope: Scope, owner: Scope) -> bool:
    name, answer = house.admit(scope, house.prompts[owner])
    house.player.release(name, stored=False)
    return all_or_nothing(answer.cached_tokens, PROMPT - 1)


def match_partly(house: House, scope: Scope, owner: Scope) -> bool:
    common = house.random.randrange(1, BLOCK)
    name, answer = house.admit(scope, [*house.prompts[owner][:common], 9, 9])
    house.player.release(name, stored=False)
    return all_or_nothing(answer.cached_tokens, common)


def share_what_is_computed(house: House, scope: Scope, owner: Scope) -> bool:
    prompt = [house.random.randrange(2000, 2**32) for _ in range(2 * BLOCK + 1)]
    writer, first = house.admit(owner, prompt)
    name, answer = house.admit(scope, prompt)
    house.player.release(name, stored=False)
    house.player.release(writer, stored=False)
    assert (answer.wait_for_handle == first.sequence_handle) == (answer.cached_tokens > 0)
    return all_or_nothing(answer.cached_tokens, 2 * BLOCK)


def explain(house: House, scope: Scope, owner: Scope) -> bool:
    prefix = pb.PrefixSelector(executor_id=EXECUTOR, token_ids=house.prompts[owner], **options(scope))
    (explanation,) = house.call("ExplainPrefix", pb.ExplainPrefixRequest(prefix=prefix)).explanations
    assert bool(explanation.cached_tokens) == bool(explanation.blocks)
    return all_or_nothing(explanation.cached_tokens, PROMPT - 1)


def purge_a_prompt(house: House, scope: Scope, owner: Scope) -> bool:
    prefix = pb.PrefixSelector(executor_id=EXECUTOR, token_ids=house.prompts[owner], **options(scope))
    request = pb.PurgeBlocksRequest(filter=pb.BlockFilter(prefix=prefix), validate_only=True)
    return all_or_nothing(house.call("PurgeBlocks", request).purged_blocks, -(-PROMPT // BLOCK))


def all_or_nothing(found: int, everything: int) -> bool:
    assert found in (0, everything), f"{found} of {everything}"
    return found > 0


@pytest.mark.parametrize(
    ("ask", "pool"),
    [
        (look_up, DEVICE),
        (look_up, HOST),
        (match_partly, DEVICE),
        (share_what_is_computed, DEVICE),
        (explain, DEVICE),
        (purge_a_prompt, DEVICE),
    ],
)
def test_no_scope_finds_blocks_of_another(
    tmp_path: Path, ask: Callable[[House, Scope, Scope], bool], pool: dict[str, int]
) -> None:
    house = build(tmp_path, pool)
    for _ in range(PROBES // 4):
        owner = house.random.choice(SCOPES)
        stranger = house.stranger(owner)
        assert ask(house, owner, owner), f"{owner} does not find its own"
        assert not ask(house, stranger, owner), f"{stranger} finds what {owner} owns"
    assert list(house.call("CheckPool", pb.CheckPoolRequest()).violations) == []


# Lists: which items appear under this salt?


def list_blocks(house: House, salt: str) -> list[Scope]:
    request = pb.ListBlocksRequest(pool_id=POOL_ID, page_size=1000, filter=pb.BlockFilter(salt=salt))
    return [scope_of(block) for block in house.call("ListBlocks", request).blocks]


def list_prefixes(house: House, salt: str) -> list[Scope]:
    request = pb.ListPrefixesRequest(pool_id=POOL_ID, page_size=1000, filter=pb.BlockFilter(salt=salt))
    return [scope_of(prefix.last_block) for prefix in house.call("ListPrefixes", request).prefixes]


def list_sequences(house: House, salt: str) -> list[Scope]:
    request = pb.ListSequencesRequest(page_size=1000, salt=salt)
    names = [sequence.sequence_id for sequence in house.call("ListSequences", request).sequences]
    return [SCOPES[int(name.removeprefix("running "))] for name in names]


def watch_events(house: House, salt: str) -> list[Scope]:
    events = [event for event in house.backend.events(0, salt) if event.block.key]
    snapshot = [event for event in house.backend.events(None, salt) if event.block.key]
    assert {event.block.key for event in snapshot} <= {event.block.key for event in events}
    return [scope_of(event.block) for event in events]


def scope_of(block: pb.Block) -> Scope:
    return (
        block.salt if block.HasField("salt") else None,
        block.adapter_id if block.HasField("adapter_id") else None,
    )


@pytest.mark.parametrize("show", [list_blocks, list_prefixes, list_sequences, watch_events])
def test_a_listing_by_salt_has_all_of_it_and_nothing_else(
    tmp_path: Path, show: Callable[[House, str], list[Scope]]
) -> None:
    house = build(tmp_path, DEVICE, running=True)
    for salt in SALTS[1:]:
        assert set(show(house, salt)) == {scope for scope in SCOPES if scope[0] == salt}


def test_a_purge_removes_all_of_a_salt_and_nothing_else(tmp_path: Path) -> None:
    house = build(tmp_path, DEVICE)
    purged = set()
    for salt in SALTS[1:]:
        request = pb.PurgeBlocksRequest(filter=pb.BlockFilter(salt=salt))
        assert house.call("PurgeBlocks", request).purged_blocks == len(ADAPTERS) * -(-PROMPT // BLOCK)
        purged |= {scope for scope in SCOPES if scope[0] == salt}
        assert {scope for scope in SCOPES if not look_up(house, scope, scope)} == purged
