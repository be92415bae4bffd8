"""The published key function against the code and against one written from the text alone."""

import json
import re
import struct
import tomllib
from hashlib import sha256
from typing import Any

import pytest

from cachemgr.blocks.extra_keys import extra_bytes, prefix_keys
from cachemgr.types import ExtraKey
from protos.kvcommon.block_keys import child_key, root_key
from protos.kvcommon.tokens import TOKEN_BYTES, pack, packed_bytes
from tests.stack import ROOT

VECTORS = json.loads((ROOT / "protos/kvcache/v1/keys.json").read_text())
TEXT = (ROOT / "docs/keys.md").read_text()


def root_by_the_text(fingerprint: bytes, salt: str | None, adapter: int | None, weights: str) -> bytes:
    message = b"kvkeep/root/1\x00" + struct.pack("<I", len(fingerprint)) + fingerprint
    if salt is None:
        message += b"\x00"
    else:
        message += b"\x01" + struct.pack("<I", len(salt.encode("utf-8"))) + salt.encode("utf-8")
    message += b"\x00" if adapter is None else b"\x01" + struct.pack("<Q", adapter)
    if weights:
        message += b"\x01" + struct.pack("<I", len(weights.encode("utf-8"))) + weights.encode("utf-8")
    return sha256(message).digest()


def root_inputs(vector: dict[str, Any]) -> tuple[bytes, str | None, int | None, str]:
    return bytes.fromhex(vector["fingerprint"]), vector["salt"], vector["adapter_id"], vector["weight_version"]


def keys_by_the_text(vector: dict[str, Any]) -> list[str]:
    tokens, size = vector["token_ids"], vector["block_size"]
    before = root_by_the_text(*root_inputs(vector))
    keys = []
    for begin in range(0, len(tokens), size):
        block = tokens[begin : begin + size]
        message = b"kvkeep/block/2\x00" + before + struct.pack("<I", len(block))
        for token in block:
            message += struct.pack("<I", token)
        for extra in vector["extra_keys"]:
            covered = range(extra["start"], extra["start"] + extra["length"])
            standing = sum(begin + place in covered for place in range(len(block)))
            if standing:
                digest = bytes.fromhex(extra["digest"])
                message += struct.pack("<i", extra["start"] - begin)
                message += struct.pack("<I", standing) + struct.pack("<I", len(digest)) + digest
        before = sha256(message).digest()
        keys.append(before.hex())
    return keys


def our_keys(vector: dict[str, Any]) -> list[str]:
    size, packed = vector["block_size"], packed_bytes(pack(vector["token_ids"]))
    extra = [ExtraKey(one["start"], one["length"], bytes.fromhex(one["digest"])) for one in vector["extra_keys"]]
    root = root_key(*root_inputs(vector))
    keys = prefix_keys(root, packed, size, extra)
    start = len(keys) * size
    rest = packed[start * TOKEN_BYTES :]
    if rest:
        end = start + len(rest) // TOKEN_BYTES
        keys.append(child_key(keys[-1] if keys else root, rest, extra_bytes(extra, start, end)))
    return [key.hex() for key in keys]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_vector_is_what_the_text_and_the_code_make_of_it(vector: dict[str, Any]) -> None:
    inputs = root_inputs(vector)
    assert root_by_the_text(*inputs).hex() == root_key(*inputs).hex() == vector["root"]
    assert keys_by_the_text(vector) == our_keys(vector) == vector["keys"]


def test_the_vectors_have_different_keys_for_different_contents() -> None:
    assert len(VECTORS) >= 12
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)
    roots = {root_inputs(vector): vector["root"] for vector in VECTORS}
    assert len(set(roots.values())) == len(roots)
    same_tokens = [vector["keys"][0] for vector in VECTORS if vector["token_ids"] == list(range(1, 10))]
    # Three vectors are about the tokens after the first block, and one about an extra key that ends there.
    assert len(same_tokens) - len(set(same_tokens)) == 3


def test_the_example_of_the_text_is_the_first_vector() -> None:
    example = VECTORS[0]
    assert re.findall(r"^    (?:root |first|last ) = (\w{64})$", TEXT, re.MULTILINE) == [
        example["root"],
        *example["keys"],
    ]
    lines = re.findall(r"^    ((?:[0-9a-f]{2} )+) ", TEXT, re.MULTILINE)
    root = bytes.fromhex("".join(lines[:4]))
    assert f"these {len(root)} bytes" in TEXT
    assert sha256(root).hexdigest() == example["root"]


def test_the_vectors_are_part_of_the_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["tool"]["setuptools"]["package-data"]["protos.kvcache.v1"] == ["keys.json"]
