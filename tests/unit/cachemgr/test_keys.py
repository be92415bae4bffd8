"""The key function: what may share a block, and what may not."""

from hashlib import sha256
from itertools import combinations

import pytest

from cachemgr.blocks.block_keys import child_key, extend_chain, pack, packed_bytes, root_key, unpack
from tests.support.in_process_manager import World

F = b"\x01" * 32
CALLERS = [{}, {"salt": "x"}, {"salt": "y"}, {"adapter_id": 0}, {"adapter_id": 1}, {"salt": "x", "adapter_id": 0}]


def test_the_root_key_is_the_published_one():
    written_out = b"kvkeep/root/1\0" + b"\x20\0\0\0" + F + b"\1\2\0\0\0hi" + b"\1" + b"\7" + b"\0" * 7
    assert root_key(F, "hi", 7) == sha256(written_out).digest()
    assert root_key(F, None, None) == sha256(b"kvkeep/root/1\0" + b"\x20\0\0\0" + F + b"\0\0").digest()


def test_a_block_key_is_the_published_one():
    written_out = b"kvkeep/block/2\0" + b"p" * 32 + b"\2\0\0\0" + b"\1\0\0\0\2\1\0\0"
    assert child_key(b"p" * 32, packed_bytes(pack([1, 258]))) == sha256(written_out).digest()


def test_no_two_of_salt_and_adapter_are_confused():
    kinds = [(None, None), (None, 0), (None, 1), ("0", None), ("\0", None), ("\0", 0), ("\1", None), ("a", 0)]
    keys = {root_key(F, salt, adapter) for salt, adapter in kinds}
    assert len(keys) == len(kinds)
    assert root_key(b"ab", None, None) != root_key(b"a", None, None)


def test_a_chain_is_its_blocks_keys_one_after_another():
    packed = packed_bytes(pack(range(11)))
    keys: list[bytes] = []
    extend_chain(keys, b"r" * 32, packed, 4)
    first = child_key(b"r" * 32, packed[:16])
    assert keys == [first, child_key(first, packed[16:32])]
    extend_chain(keys, b"r" * 32, packed[32:] + b"\xff\0\0\0", 4)
    assert keys[2:] == [child_key(keys[1], packed[32:44] + b"\xff\0\0\0")]
    assert unpack(packed[:16]) == (0, 1, 2, 3)


def test_a_block_of_fewer_tokens_has_another_key():
    assert child_key(b"r" * 32, b"\0" * 8) != child_key(b"r" * 32, b"\0" * 4)
    assert child_key(b"r" * 32, b"\0" * 8) != child_key(b"r" * 32, b"\0" * 8, extra=b"digest")


@pytest.mark.parametrize(
    ("one", "other"),
    list(combinations(CALLERS, 2)),
    ids=str,
)
def test_other_salt_or_adapter_finds_nothing(one, other):
    world = World(16)
    world.cache(list(range(9)), **one)
    assert world.cached_tokens(list(range(9)), **other) == 0
    assert world.cached_tokens(list(range(9)), **one) == 8
