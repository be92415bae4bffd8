"""Which layers a model has, found by running it once, and the groups that share a pool."""

from typing import Any

import torch
from torch import Tensor

from executor.cache.pool import LayerGroup, LayerShape
from executor.errors import FamilyError, ModelError
from kernels.paged_attention.batch import AttentionArgs


class Recorder:
    """Replaces the pools during one call and notes each layer's shape."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        args: AttentionArgs,
    ) -> Tensor:
        """Notes the layer's shape; returns zeros of the query's shape. Raises FamilyError for unusual attention."""
        if layer in self.shapes:
            raise FamilyError(f"layer {layer} attends twice in one pass")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise FamilyError(f"layer {layer} has keys and values of different sizes")
        self.shapes[layer] = LayerShape(args.window, key.shape[1], key.shape[2])
        return torch.zeros(query.shape, dtype=query.dtype, device=query.device)


def check_layers(shapes: dict[int, LayerShape], config: Any) -> None:
    """Raises ModelError if the paged attention would not compute what the model's configuration says."""
    count = int(config.num_hidden_layers)
    silent = sorted(set(range(count)) - set(shapes))
    if len(shapes) > count:
        raise FamilyError(f"{config.model_type}: {len(shapes)} layers attend, its configuration has {count}")
    if silent:
        raise FamilyError(
            f"{config.model_type}: layers {silent} of {count} keep their state elsewhere than in an attention cache "
            "of their own"
        )
    for layer, shape in shapes.items():
        kind, window = _configured(config, layer)
        if kind not in ("full_attention", "sliding_attention", None):
            raise FamilyError(f"{config.model_type}: layer {layer} is of kind {kind}")
        if kind is not None and shape.window != window:
            raise ModelError(
                f"{config.model_type}: layer {layer} attends over a window of {shape.window} tokens, "
                f"its configuration says {window}"
            )


def _configured(config: Any, layer: int) -> tuple[str | None, int | None]:
    """Returns kind and window of a layer as configured; kind None if the configuration does not say."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ("sliding_attention", window) if window is not None else (None, None)
    return kinds[layer], (window if kinds[layer] == "sliding_attention" else None)


def group_layers(shapes: dict[int, LayerShape]) -> tuple[LayerGroup, ...]:
    """Returns groups in the order of their first layers."""
    members: dict[LayerShape, list[int]] = {}
    for layer in sorted(shapes):
        members.setdefault(shapes[layer], []).append(layer)
    return tuple(LayerGroup(shape, tuple(layers)) for shape, layers in members.items())
