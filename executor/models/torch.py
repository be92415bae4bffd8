"""Runs a transformers decoder, unchanged, over packed tokens and paged attention."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.batch import AdapterSpan, DeviceBatch, HostBatch
from executor.cache.pool import KvPools
from executor.models.attention import PagedLayers
from executor.models.forward import ForwardOutput
from kernels.weights import LowRank


@dataclass(frozen=True, eq=False)
class TorchAdapter:
    """What an adapter adds, by the names of modules, on the model's device and in its type."""

    modules: Mapping[str, LowRank]


def on_device(part: LowRank, like: Tensor) -> LowRank:
    """Returns the matrices on the device and in the type of a tensor."""
    return LowRank(part.a.to(like), part.b.to(like), part.scale)


def add_low_rank(sums: Tensor, x: Tensor, part: LowRank, begin: int, end: int) -> None:
    """Adds scale * (x a^T) b^T to the rows from `begin` to `end` of sums [T, N]. x: [T, K]."""
    sums[begin:end].addmm_((x[begin:end] @ part.a.t()).mul_(part.scale), part.b.t())


class TorchForward:
    """The forward pass of any decoder that transformers has."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Spans of the step that is being computed.
        self._spans: Sequence[AdapterSpan] = ()
        # Modules with a hook that looks for adapters: those to which an adapter has ever added.
        self._hooked: set[str] = set()
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def warmup(self, pools: KvPools, last_tokens: Tensor) -> None:
        """Does nothing."""

    def prepare(self, batch: HostBatch, pools: KvPools) -> Callable[[], ForwardOutput]:
        for span in batch.adapters:
            self._hook(span.adapter)
        return partial(self._run, batch.to_device(), pools)

    def adapter(self, modules: Mapping[str, LowRank]) -> TorchAdapter:
        like = next(self._module.parameters())
        return TorchAdapter({name: on_device(part, like) for name, part in modules.items()})

    def _hook(self, adapter: TorchAdapter) -> None:
        for name in adapter.modules.keys() - self._hooked:
            self._module.get_submodule(name).register_forward_hook(partial(self._add, name))
            self._hooked.add(name)

    def _add(self, name: str, _module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Adds, after a linear module, to its output [1, T, N] in place. inputs: [1, T, K]."""
        for span in self._spans:
            if (part := span.adapter.modules.get(name)) is not None:
                add_low_rank(output[0], inputs[0][0], part, span.begin, span.end)

    @torch.inference_mode()
    def _run(self, sent: DeviceBatch, pools: KvPools) -> ForwardOutput:
        layers = PagedLayers(pools, sent)
        self._spans = sent.adapters
        output = self._module(
            input_ids=sent.ids()[None],
            position_ids=sent.positions[None],
            use_cache=False,
            kvkeep_layers=layers,
            **({"logits_to_keep": sent.rows} if self._slices_logits else {}),
        ).logits[0]
        logits = output if self._slices_logits else output[sent.rows]
        return ForwardOutput(logits, None, sent.output_token_rows, layers.scores())
