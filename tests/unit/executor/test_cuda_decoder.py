"""The fused layers, and steps as a CUDA graph repeats them, on a CPU: nothing is captured there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM

from executor.batch import AdapterSpan, DeviceBatch, HostBatch, ScoredSequence, SequenceState, build_batch
from executor.cache.pool import KvPools
from executor.errors import ModelError
from executor.models import cuda as cuda_decoder
from executor.models.attention import NAME
from executor.models.cuda import (
    DECODES,
    MOST_SEQUENCES,
    PREFILLS,
    CudaGraphRunner,
    GraphBuffers,
    GraphSize,
    size_of,
)
from executor.models.forward import Model
from executor.models.llama import FAMILIES
from executor.models.torch import TorchForward
from executor.step import BlockTableUpdate, NewSequence
from kernels.rotary_store.launch import rotary_store
from tests.support.reference import first_mismatch, greedy
from tests.unit.executor.conftest import BLOCK_SIZE, Driver, fused, load_fused, on_torch
from tests.unit.executor.evicting_sequences import PROMPT, VARIANTS, policy_of, run
from tests.unit.executor.tiny_models import COMPILED_CONFIGS, CONFIGS, VOCAB

KNOWN = [name for name in sorted(CONFIGS | COMPILED_CONFIGS) if name.startswith(FAMILIES)]


@pytest.mark.parametrize("count", [1, 3, 9, 33, 257])
def test_padding_changes_nothing(count: int, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    prompts = [[i % 90, 3 + i % 7] for i in range(count)]
    outputs = []
    for model in (load_fused(folder), on_torch(folder)):
        driver = Driver(model, num_blocks=2 * count + 2)
        joining = tuple(driver.new_sequence(i, prompt, room=4) for i, prompt in enumerate(prompts))
        outcomes = [driver.step(new_sequences=joining, chunks=dict.fromkeys(range(count), 2))]
        outcomes += [driver.step(), driver.step()]
        outputs.append([[one.token_id for one in outcome.sampled] for outcome in outcomes])
    assert outputs[0] == outputs[1]
    assert [len(tokens) for tokens in outputs[0]] == [count] * 3


def test_chunks_of_one_token_need_not_end_a_prompt(model_folder: Callable[[str], Path]) -> None:
    folder, outputs = model_folder("llama"), []
    for model in (load_fused(folder), on_torch(folder)):
        driver = Driver(model)
        joining = tuple(driver.new_sequence(i, prompt) for i, prompt in enumerate(([5, 60, 7], [11, 3])))
        outcomes = [driver.step(new_sequences=joining, chunks={0: 1, 1: 1})]
        outcomes += [driver.step(chunks={0: 1, 1: 1}), driver.step(chunks={0: 1}), driver.step()]
        outputs.append([[one.token_id for one in outcome.sampled] for outcome in outcomes])
    assert outputs[0] == outputs[1]
    assert [len(tokens) for tokens in outputs[0]] == [0, 1, 2, 2]


def test_tables_grow_while_sequences_join_and_leave(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama, compiled")
    prompts = [[5, 60, 7, 80, 9], [11, 3, 44], [1, 2, 3, 4, 5, 6, 7, 8, 9], [90]]
    expected = [[one.token_id for one in Driver(on_torch(folder)).generate(1, prompt, 20)] for prompt in prompts]
    driver = Driver(load_fused(folder))
    lengths: dict[int, int] = {}
    outputs: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for clock in range(40):
        ended = tuple(i for i in lengths if len(outputs[i]) == 20)
        for i in ended:
            del lengths[i]
        growth = tuple(
            BlockTableUpdate(i, group, slots)
            for i, length in lengths.items()
            if length % BLOCK_SIZE == 0
            for group, slots in enumerate(driver.blocks(1))
        )
        joining: tuple[NewSequence, ...] = ()
        if clock % 3 == 0 and clock // 3 < len(prompts):
            # Not one block more than the prompt needs.
            joining = (driver.new_sequence(clock // 3, prompts[clock // 3], room=0),)
        chunks = {one.sequence: len(one.token_ids) for one in joining}
        outcome = driver.step(removed=ended, new_sequences=joining, chunks=chunks, table_updates=growth)
        lengths |= chunks
        for sampled in outcome.sampled:
            lengths[sampled.sequence] += sampled.sequence not in chunks
            outputs[sampled.sequence].append(sampled.token_id)
    assert [outputs[i] for i in range(len(prompts))] == expected


class Replaying(CudaGraphRunner):
    """Repeats each size's first step as a CUDA graph does: on the same tensors, and all else as it was then."""

    def _run(self, buffers: GraphBuffers, batch: DeviceBatch, size: GraphSize) -> None:
        first: Any = self._graphs.setdefault(size, batch)  # type: ignore[arg-type]
        self._launch(buffers, replace(first, paged=tuple(replace(one) for one in first.paged)), size)


@contextmanager
def replaying(folder: Path) -> Iterator[Model]:
    """In Triton's interpreter: a model that launches every kernel as on CUDA, and repeats decoding steps."""
    from executor.models import cuda as cuda_decoder
    from executor.models.attention import NAME
    from kernels.paged_attention import cpu
    from kernels.paged_attention import launch as attention
    from kernels.rms_norm import launch as norms
    from kernels.rotary_store import launch as rotary
    from kernels.silu_mul import launch as activation

    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        rows = [None if one is None else norms.in_rows("x", one) for one in (x, residual, out)]
        norms.norm_with_triton(rows[0], weight, eps, rows[1], rows[2])  # type: ignore[arg-type]
        return out

    def silu_mul(gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        activation.silu_mul_with_triton(gate_up, out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "attend", attention.attend_with_triton)
        patch.setattr(rotary, "rotate_with_torch", rotary.rotate_with_triton)
        patch.setattr(cuda_decoder, "rms_norm", rms_norm)
        patch.setattr(cuda_decoder, "silu_mul", silu_mul)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME).eval()
        model = on_torch(folder)
        forward = fused(TorchForward(module), module, model, Replaying)
        assert isinstance(forward, Replaying)
        yield replace(model, forward=forward)


def replayed(
    folder: Path, prompts: list[list[int]], count: int, cache: torch.dtype = torch.float32
) -> tuple[list[list[int]], set[GraphSize]]:
    """Greedy outputs, and the sizes that were repeated."""
    with replaying(folder) as model:
        driver = Driver(model, cache=cache)
        outputs: list[list[int]] = [[] for _ in prompts]
        for clock in range(len(prompts) + count - 1):
            ended = tuple(i for i, output in enumerate(outputs) if clock == i + count and len(output) == count)
            joining = (driver.new_sequence(clock, prompts[clock], room=count),) if clock < len(prompts) else ()
            chunks = {one.sequence: len(one.token_ids) for one in joining}
            for sampled in driver.step(removed=ended, new_sequences=joining, chunks=chunks).sampled:
                outputs[sampled.sequence].append(sampled.token_id)
    return outputs, set(model.forward._graphs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen2, compiled", "qwen3, compiled"])
def test_a_repeated_step_computes_with_what_was_put_into_its_buffers(
    name: str, model_folder: Callable[[str], Path], interpreter: Callable[..., Any]
) -> None:
    folder = model_folder(name)
    prompts, count = [[5, 60, 7, 80, 9, 90, 2, 3, 17, 80, 41, 6], [11, 3, 44], [1]], 5
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    outputs, sizes = interpreter(replayed, folder, prompts, count)
    for prompt, output in zip(prompts, outputs, strict=True):
        mismatch = first_mismatch(greedy(reference, prompt, count), output)
        assert mismatch is None or mismatch.is_tie
    # The prompts come alone and beside decodes.
    assert sizes == {*DECODES[:3], PREFILLS[0]}


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_repeated_step_reads_and_writes_keys_and_values_of_8_bits(
    cache: torch.dtype, model_folder: Callable[[str], Path], interpreter: Callable[..., Any]
) -> None:
    folder, prompts, count = model_folder("qwen3, compiled"), [[5, 60, 7, 80, 9, 90, 2, 3], [11, 3, 44]], 5
    outputs, sizes = interpreter(replayed, folder, prompts, count, cache)
    driver = Driver(on_torch(folder), cache=cache)
    assert outputs == [
        [one.token_id for one in driver.generate(handle, prompt, count)] for handle, prompt in enumerate(prompts)
    ]
    assert sizes == {*DECODES[:2], PREFILLS[0]}


def slid(model: Model, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Greedy outputs, with and without a sliding window, of one running set."""
    policies = {handle: policy_of(model, VARIANTS["window alone"]) if handle < 3 else None for handle in prompts}
    outputs, evicted = run(model, prompts, policies, output=8)
    assert {one.sequence for one in evicted} == {1, 2}
    return outputs


def replayed_slid(folder: Path, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    with replaying(folder) as model:
        return slid(model, prompts)


def test_a_repeated_step_stores_tokens_where_evicted_ones_were(
    model_folder: Callable[[str], Path], interpreter: Callable[..., Any]
) -> None:
    folder, prompts = model_folder("llama, compiled"), {1: PROMPT, 2: PROMPT[9:], 3: PROMPT[::-1]}
    assert interpreter(replayed_slid, folder, prompts) == slid(on_torch(folder), prompts)


def refuse_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nAll of it.")


def test_layers_without_memory_end_the_start(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_decoder, "rotary_store", refuse_memory)
    said = "^there is no memory for the fused decoder of this model on cpu: OutOfMemoryError: CUDA out of memory"
    with pytest.raises(ModelError, match=said):
        load_fused(model_folder("llama"))


@pytest.mark.parametrize(
    ("change", "words"), [(lambda heads: heads.mul_(1.5), "is off by"), (lambda heads: heads[:, :, 1:], "fails: ")]
)
def test_layers_that_compute_something_else_or_fail_are_not_used(
    change: Callable[[Tensor], Tensor], words: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rotary_store
    monkeypatch.setattr(
        cuda_decoder, "rotary_store", lambda query, *rest, **scales: right(change(query), *rest, **scales)
    )
    with capture_logs() as logs:
        model = load_fused(model_folder("llama"))
    assert isinstance(model.forward, TorchForward)
    assert [words in entry["cause"] for entry in logs if "slower" in entry["event"]] == [True]
    monkeypatch.undo()
    # The joined weights, of which the modules now have views, still serve them.
    prompt = [3, 1, 4, 1, 5]
    expected, outputs = (
        [one.token_id for one in Driver(one).generate(1, prompt, 6)] for one in (on_torch(model_folder("llama")), model)
    )
    assert outputs == expected


def test_joined_weights_take_no_memory_twice(model_folder: Callable[[str], Path]) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32, attn_implementation=NAME)
    before = {name: one.clone() for name, one in module.named_parameters()}
    model = on_torch(model_folder("llama"))
    assert isinstance(fused(TorchForward(module), module, model), CudaGraphRunner)
    for layer in module.model.layers:
        places = [getattr(layer.self_attn, f"{name}_proj").weight.untyped_storage().data_ptr() for name in "qkv"]
        assert len(set(places)) == 1
    assert all(torch.equal(one, before[name]) for name, one in module.named_parameters())


@pytest.mark.parametrize("size", [*DECODES, *PREFILLS], ids=str)
def test_a_size_has_one_buffer_whatever_the_work(size: GraphSize, model_folder: Callable[[str], Path]) -> None:
    model = on_torch(model_folder("mistral"))
    pools = KvPools(model.groups, 4, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    last_tokens = torch.zeros(300, dtype=torch.int64)
    buffers = GraphBuffers(pools, last_tokens, model.max_positions, torch.zeros(MOST_SEQUENCES, VOCAB))
    # Of each sequence.
    most = 1 if size.decode else size.tokens // size.sequences
    seen = set()
    for sequences, tokens, computed in (
        (0, 1, 0),
        (1, 1, 7),
        (size.sequences, most, model.max_positions - most),
        (max(1, size.sequences // 2), most, 3),
    ):
        states = []
        blocks = (tuple(range(model.max_positions // BLOCK_SIZE)),)
        for number in range(sequences):
            new = NewSequence(number, (1,) * (computed + tokens), 1, computed, blocks)
            states.append(SequenceState.of(new, number))
        work = build_batch(states, [tokens] * sequences, last_tokens, BLOCK_SIZE, 1)
        batch = buffers.to_device(work, size)
        (paged,) = batch.paged
        tensors = (
            batch.token_ids,
            batch.input_token_rows,
            batch.positions,
            *batch.slot_mappings,
            paged.query_start,
            paged.seq_lens,
            batch.rows,
        )
        seen.add(tuple((one.data_ptr(), one.shape, one.stride()) for one in (*tensors, paged.block_tables)))
        assert (paged.max_query_len, paged.max_seq_len) == (1 if size.decode else size.tokens, model.max_positions)
        assert paged.query_start.tolist() == [tokens * min(row, sequences) for row in range(size.sequences + 1)]
        assert paged.seq_lens.tolist() == [computed + tokens] * sequences + [0] * (size.sequences - sequences)
        # Tokens of no sequence are stored nowhere.
        assert batch.slot_mappings[0].tolist()[tokens * sequences :] == [-1] * (size.tokens - tokens * sequences)
        used = -(-(computed + tokens) // BLOCK_SIZE)
        for row in range(sequences):
            assert paged.block_tables[row, :used].tolist() == list(range(used))
    assert len(seen) == 1


def batch_of(counts: list[int], **changes: Any) -> HostBatch:
    """Sequences that compute these numbers of tokens, which are all their tokens."""
    states = [SequenceState.of(NewSequence(i, (1,) * n, n, 0, ((*range(n),),)), i) for i, n in enumerate(counts)]
    return replace(build_batch(states, counts, torch.zeros(300, dtype=torch.int64), 1, 1), **changes)


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([], None),
        ([1], DECODES[0]),
        ([1] * 5, GraphSize(8, 8, True)),
        ([1] * 256, DECODES[-1]),
        ([1] * 257, None),
        ([2], GraphSize(32, 32)),
        ([1] * 33 + [2], GraphSize(64, 64)),
        ([5] * 17, GraphSize(96, 64)),
        ([2] * 65, GraphSize(160, 160)),
        ([1] * 63 + [1024], GraphSize(1152, 64)),
        ([2048], GraphSize(2048, 64)),
        ([2049], None),
        ([2] * 257, None),
    ],
    ids=lambda value: f"{len(value)} of {sum(value)}" if isinstance(value, list) else str(value),
)
def test_the_smallest_graph_that_holds_a_batch_repeats_it(counts: list[int], size: GraphSize | None) -> None:
    assert size_of(batch_of(counts)) == size


def test_what_changes_from_step_to_step_is_repeated_by_no_graph() -> None:
    # Padded alike, so that scores change nothing.
    assert size_of(batch_of([2, 1], scored=(ScoredSequence(0, 1),))) == size_of(batch_of([2, 1])) == PREFILLS[0]
    assert size_of(batch_of([1, 1], adapters=(AdapterSpan(None, 0, 1),))) is None
    # Scored prompts want more rows than there are sequences.
    assert size_of(batch_of([4], rows=np.arange(4))) is None


def test_preparing_for_all_sizes_writes_nothing(model_folder: Callable[[str], Path]) -> None:
    driver = Driver(load_fused(model_folder("llama")))
    driver.runner.warmup()
    pool = driver.runner.pools.pools[0]
    assert bool(pool.k[:, 1:].isnan().all())
    assert bool((pool.k[:, 0] == 0).all())
