"""Which executors have equal keys for equal prompts, and how these keys are computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from protos.kvcommon.block_keys import extend_chain, low_keys, prompt_low_keys, root_key
from protos.kvcommon.tokens import TOKEN_BYTES, packed_bytes


class KeySpace(NamedTuple):
    """What determines the keys of prompts. Engines of one model may differ in block size, files, or weight version."""

    model_fingerprint: bytes
    block_size: int
    weight_version: str = ""

    def root(self, salt: str | None, adapter_id: int | None = None) -> bytes:
        """Returns the parent key of a prompt's first block."""
        return root_key(self.model_fingerprint, salt, adapter_id, self.weight_version)

    def keys(self, token_ids: array[int], salt: str | None, adapter_id: int | None = None) -> array[int]:
        """Returns the low 64 bits of the keys of a prompt's full blocks."""
        return prompt_low_keys(self.root(salt, adapter_id), packed_bytes(token_ids), self.block_size)

    def keys_in_parts(
        self, token_ids: array[int], salt: str | None, adapter_id: int | None, blocks: int
    ) -> Iterator[array[int]]:
        """Yields the keys in parts, each computed on demand. blocks: most blocks of a part."""
        parent, packed = self.root(salt, adapter_id), packed_bytes(token_ids)
        width = blocks * self.block_size * TOKEN_BYTES
        for start in range(0, len(packed), width):
            keys = [parent]
            extend_chain(keys, parent, packed[start : start + width], self.block_size)
            parent = keys[-1]
            yield low_keys(keys[1:])
