"""The attention function that transformers calls in every layer, and what it needs of a step.

transformers hands a model's extra keyword arguments down to its attention function: that is how a step's metadata
reaches the layers, so that nothing here is shared between runners.
"""

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from executor.errors import FamilyError

NAME = "kvkeep_paged"
# What families hand down beside the named arguments, and what says nothing about which keys count and how much: where
# a token stands is in its query and key by then, and dropout is for training.
HARMLESS = {"logits_to_keep", "dropout", "position_ids", "cache_position", "position_embeddings", "use_cache"}


class Layers(Protocol):
    """What a model call is given as `kvkeep_layers`."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
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

    No mask comes in: transformers builds none for an attention function that it has no mask function for. Raises
    FamilyError where the module asks for what is not computed here, such as a bias by distance.
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
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(NAME, paged)
