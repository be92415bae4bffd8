"""The GPU benchmark: effects of a failed check, an error or a time limit on other parts, and that checks can fail."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from bench.gpu import __main__ as gpu
from bench.gpu import kernels, models
from bench.gpu.parts import (
    Bench,
    Figure,
    WrongError,
)
from executor.cache.pool import KvPools
from executor.core.runner import Runner
from executor.models.load import model_of
from kernels.rms_norm.launch import rms_norm


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Tiny models lose more to waking threads than they win.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_speed_needs_a_check() -> None:
    for part in gpu.PARTS:
        checks = {one.name for one in gpu.chosen([part.name])} & {gpu.KERNELS, gpu.MODELS}
        assert checks or part.name == gpu.BANDWIDTH


def test_the_check_of_kernels_passes_and_can_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check_on("cpu")
    right = rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda *args, **options: right(*args, **options) * 1.05)
    for name in ("store_kv", "compact_kv", "rotate_keys"):
        monkeypatch.setattr(kernels, name, lambda *args: None)
    with pytest.raises(WrongError) as caught:
        kernels.check_on("cpu")
    found = [reason.partition(" is off by ")[0] for reason in str(caught.value).split("; ")]
    wrong = ["norm", "norm of a sum", "keys turned back", "store", "compaction"]
    assert found == [f"{name} in {dtype}" for dtype in kernels.BARS for name in wrong]


@pytest.mark.parametrize(("sequences", "queries"), [(3, 1), (2, 64)])
def test_both_layouts_hold_the_same_problem(sequences: int, queries: int) -> None:
    problem = kernels.Problem.make(sequences, 64, queries, "cpu")
    query, keys, values = problem.in_one_piece()
    theirs = F.scaled_dot_product_attention(query, keys, values, is_causal=queries > 1, enable_gqa=True)
    problem.hold_to(theirs)
    with pytest.raises(WrongError, match="from torch's"):
        problem.hold_to(theirs.roll(1, 1))


SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 257}
TINY = LlamaConfig(**(models.SMALL["Llama"].to_dict() | SIZES))


def test_the_check_of_models_passes() -> None:
    models.check_on("cpu", "tiny", TINY)


def test_the_check_of_models_is_red_when_a_way_gives_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    right = models.run_requests

    def wrong(runner: Runner, *rest: object) -> tuple[list[list[int]], float]:
        outputs, seconds = right(runner, *rest)  # type: ignore[arg-type]
        if isinstance(runner.model.forward, models.WithoutGraphs):
            outputs[2][5] += 1
        return outputs, seconds

    monkeypatch.setattr(models, "run_requests", wrong)
    with pytest.raises(WrongError, match=r"^tiny, no graphs: another token at 5, margin [0-9.e-]+$"):
        models.check_on("cpu", "tiny", TINY)


def test_the_check_of_models_is_red_when_a_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.models.cuda.rms_norm", lambda x, *args, **options: x)
    with pytest.raises(WrongError, match="the probe refuses CudaGraphRunner"):
        models.check_on("cpu", "tiny", TINY)


def test_steps_are_measured_one_after_the_other() -> None:
    module = models.build(LlamaConfig(**(TINY.to_dict() | {"max_position_embeddings": 2048})), torch.float32, "cpu")
    model = model_of(module, "tiny")
    blocks = -(-(models.CONTEXT + models.STEPS + models.WARM) // models.BLOCK)
    runner = Runner(model, KvPools(model.groups, blocks, models.BLOCK, torch.float32, model.device))
    large = models.Large(module, runner, 1)
    bench = Bench({"copy bandwidth": Figure("copy bandwidth", 1)}, {"8B": large})
    figures = {figure.name: figure for figure in models.decode_steps(bench)}
    # Two layers of 128 x (512 + 2 x 128 + 512) + 3 x 128 x 1,024 weights, norms, and the output matrix of 257 rows.
    assert large.weight_bytes == 4 * (2 * (128 * 1280 + 3 * 128 * 1024 + 2 * 128) + 128 + 257 * 128)
    step, by_limit = (figures[f"8B decode, batch 1: {name}"] for name in ("step", "step by reading weights, K and V"))
    # At 1 GB/s, with two layers' K and V of 2 heads of 64 for each token.
    least = (large.weight_bytes + (1024 + 10 + 30) * 2 * 2 * 2 * 64 * 4) / 1e9
    assert by_limit.value == pytest.approx(step.value / 1e3 / least)
    assert "8B decode, batch 64: step" not in figures
