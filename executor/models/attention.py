"""Attention of a batch over the pools, and the attention function through which transformers calls it in every layer.

transformers hands a model's extra keyword arguments down to its attention function. A step's metadata reaches the
layers this way, so that runners share no state here.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from executor.batch import DeviceBatch, ScoredRows
from executor.cache.pool import KvPools
from executor.errors import FamilyError
from kernels.attention_scores.launch import attention_scores
from kernels.paged_attention.launch import AttentionArgs, PagedBatch, paged_attention
from kernels.scores import SequenceScores
from kernels.store_kv.launch import store_kv

NAME = "kvkeep_paged"
# Keyword arguments of families that change neither which keys count nor how much: positions are already part of query
# and key, and dropout is for training.
HARMLESS = {"logits_to_keep", "dropout", "position_ids", "cache_position", "position_embeddings", "use_cache"}


class Layers(Protocol):
    """The argument `kvkeep_layers` of a model call."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Stores key and value [T, Hkv, D], attends query [T, Hq, D]; returns [T, Hq, D], contiguous."""
        ...


def paged(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    *,
    kvkeep_layers: Layers,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] of packed tokens; returns [1, T, Hq, D].

    No mask is passed: transformers builds none for an attention function without a mask function. Raises FamilyError if
    the module asks for something that is not computed here, such as a bias by distance.
    """
    asked = sorted(name for name, value in others.items() if not (name in HARMLESS or value is None or value is False))
    if asked:
        raise FamilyError(f"{type(module).__name__} asks attention for {', '.join(asked)}")
    if attention_mask is not None:
        raise FamilyError(f"{type(module).__name__} builds a mask of its own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise FamilyError(f"{type(module).__name__} attends in both directions, as an encoder does")
    out = kvkeep_layers.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionArgs(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux),
    )
    return out[None], None


AttentionInterface.register(NAME, paged)


class PagedLayers:
    """Attention of one batch over the pools; a model call gets it as `kvkeep_layers`."""

    def __init__(self, pools: KvPools, batch: DeviceBatch) -> None:
        self._pools = pools
        self._batch = batch
        self._scoring = ScoringAttention(batch.scored, len(pools.places))

    def scores(self) -> tuple[SequenceScores, ...]:
        """Returns the scores of the batch's scored sequences, once all layers have been computed."""
        return self._scoring.result()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Stores key and value [T, Hkv, D], then attends query [T, Hq, D]; returns [T, Hq, D]."""
        cache = self._pools.layer(layer)
        slots, paged = self._batch.slot_mappings[cache.group], self._batch.paged[cache.group]
        # If the caches have a different float type, attention computes in that type.
        dtype = cache.k.dtype if cache.k_scale is None else query.dtype
        key, value = key.to(dtype), value.to(dtype)
        store_kv(key, value, cache.k, cache.v, slots, k_scale=cache.k_scale, v_scale=cache.v_scale)
        args = replace(args, k_scale=cache.k_scale, v_scale=cache.v_scale)
        return self._scoring.attend(layer, query.to(dtype), cache.k, cache.v, paged, args).to(query.dtype)


class ScoringAttention:
    """Attention of one batch, layer by layer; keeps the softmax weights of its scored rows, if there are any."""

    def __init__(self, scored: ScoredRows | None, layers: int) -> None:
        self._scored = scored
        self._layers = layers
        # [L, S, Hkv, T] float32 each, made by the first layer.
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None

    def attend(
        self, layer: int, query: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, args: AttentionArgs
    ) -> Tensor:
        if self._scored is None:
            return paged_attention(query, k_cache, v_cache, batch, args)
        rows, paged = self._scored.rows, self._scored.paged
        if query.is_cuda:
            # The kernel computes the log-sum-exp of all rows anyway.
            every = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            out = paged_attention(query, k_cache, v_cache, batch, args, lse=every)
            chosen, lse = query[rows], every[rows]
        else:
            # A CPU computes the log-sum-exp in a slower way that rounds differently, so only for the scored rows.
            out, chosen = paged_attention(query, k_cache, v_cache, batch, args), query[rows]
            lse = torch.empty(chosen.shape[:2], dtype=torch.float32)
            paged_attention(chosen, k_cache, v_cache, paged, args, lse=lse)
        sums, squares = self._new_sums(query.device, k_cache.shape[2])
        layer_squares = None if squares is None else squares[layer]
        attention_scores(chosen, k_cache, paged, lse, self._scored.counts, args, out=sums[layer], squares=layer_squares)
        return out

    def result(self) -> tuple[SequenceScores, ...]:
        """Returns the scores of each scored sequence, once all layers have been attended."""
        if self._scored is None or self._sums is None:
            return ()
        return tuple(
            SequenceScores(
                weights=self._sums[:, index, :, :length],
                squares=self._squares[:, index, :, :length] if entry.squares and self._squares is not None else None,
                rows=entry.rows,
                sequence=entry.sequence,
            )
            for index, (entry, length) in enumerate(
                zip(self._scored.entries, self._scored.paged.host_seq_lens, strict=True)
            )
        )

    def _new_sums(self, device: torch.device, kv_heads: int) -> tuple[Tensor, Tensor | None]:
        assert self._scored is not None
        if self._sums is None:
            entries = self._scored.entries
            shape = (self._layers, len(entries), kv_heads, self._scored.paged.max_seq_len)
            self._sums = torch.empty(shape, dtype=torch.float32, device=device)
            if any(entry.squares for entry in entries):
                self._squares = torch.empty_like(self._sums)
        return self._sums, self._squares
