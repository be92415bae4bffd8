"""The GPU's benchmark: what a red check, an error or the clock does to other parts, and that checks can be red."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from bench.gpu import __main__ as gpu
from bench.gpu import kernels, models
from bench.gpu.parts import (
    Bench,
    CannotRunError,
    Figure,
    Part,
    Result,
    WrongError,
    as_json,
    exit_status,
    run_all,
    show,
)
from executor.cache.pool import KvPools
from executor.core.runner import Runner

FAST = Figure("speed", 90, "%", at_least=85)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Tiny models lose more to waking threads than they win.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def done(_: Bench) -> Sequence[Figure]:
    return [FAST]


def raising(error: BaseException) -> Callable[[Bench], Sequence[Figure]]:
    def run(_: Bench) -> Sequence[Figure]:
        raise error

    return run


def sleeping(_: Bench) -> Sequence[Figure]:
    time.sleep(20)
    return []


def ran(*parts: Part, seconds: float = 60) -> dict[str, Result]:
    results: dict[str, Result] = {}
    run_all(parts, results, time.monotonic() + seconds)
    assert list(results) == [part.name for part in parts]
    return results


@pytest.mark.parametrize(
    ("figure", "met", "target"),
    [
        (FAST, True, ">= 85 %"),
        (replace(FAST, value=84.9), False, ">= 85 %"),
        (Figure("", 1.2, at_most=1.25), True, "<= 1.25"),
        (Figure("", 1.3, at_most=1.25), False, "<= 1.25"),
        (Figure("", float("nan"), at_most=1.25), False, "<= 1.25"),
        (Figure("", 1.3), None, ""),
    ],
)
def test_a_figure_knows_its_target(figure: Figure, met: bool | None, target: str) -> None:
    assert (figure.met, figure.target) == (met, target)


def test_from_a_red_check_no_speed_is_shown() -> None:
    parts = (
        Part("check", raising(WrongError("the kernel is off")), 9),
        Part("speed of it", done, 9, ("check",)),
        Part("beside", done, 9, ("speed of it",)),
    )
    results = ran(*parts)
    assert [result.status for result in results.values()] == ["wrong", "not run", "not run"]
    shown = show(results)
    assert "wrong: the kernel is off" in shown
    assert "not run: check is wrong" in shown
    assert "90" not in shown
    assert exit_status(results, parts) == 1


def test_an_error_loses_nothing_of_other_parts(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (
        Part("broken", raising(RuntimeError("no such thing\nsecond line")), 9),
        Part("bare", raising(ModuleNotFoundError("No module named 'structlog'", name="structlog")), 9),
        Part("good", done, 9),
    )
    results = ran(*parts)
    assert [result.status for result in results.values()] == ["failed", "failed", "done"]
    assert results["broken"].detail == "RuntimeError: no such thing"
    assert "package structlog is missing" in results["bare"].detail
    assert "Traceback" in capsys.readouterr().err
    assert exit_status(results, parts) == 1
    assert "90 %" in show(results)


def test_what_a_part_found_is_there_for_the_next() -> None:
    def next_one(bench: Bench) -> Sequence[Figure]:
        return [Figure("twice", 2 * bench.value("speed"))]

    results = ran(Part("first", done, 9), Part("second", next_one, 9, ("first",)))
    assert results["second"].figures == [Figure("twice", 180)]


def test_a_part_ends_with_its_time_and_all_with_theirs() -> None:
    slow, slower = Part("slow", sleeping, 0.1), Part("slower", sleeping, 9)
    results = ran(slow, Part("good", done, 9), slower, Part("last", done, 9), seconds=2)
    assert [result.status for result in results.values()] == ["not run", "done", "not run", "not run"]
    assert show(results).count("not run: out of time") == 3


def test_the_clock_is_not_stopped_by_what_catches_exceptions() -> None:
    def stubborn(_: Bench) -> Sequence[Figure]:
        try:
            time.sleep(20)
        except Exception:
            return [FAST]
        return []

    assert ran(Part("stubborn", stubborn, 0.1))["stubborn"].detail == "out of time"


def test_a_missed_target_and_a_part_without_sense_are_no_errors() -> None:
    parts = (
        Part("slow", lambda _: [replace(FAST, value=10)], 9),
        Part("large", raising(CannotRunError("it takes 20 GB")), 9),
        Part("on top of it", done, 9, ("large",)),
    )
    results = ran(*parts)
    assert [result.status for result in results.values()] == ["done", "skipped", "skipped"]
    assert exit_status(results, parts) == 0
    speed = next(line for line in show(results).splitlines() if line.startswith("speed"))
    assert speed.split() == ["speed", ">=", "85", "%", "10", "%", "NO"]


def test_everything_is_kept() -> None:
    kept = json.loads(as_json(ran(Part("first", done, 9)), {"device": "none"}))
    assert kept["facts"] == {"device": "none"}
    assert kept["parts"]["first"]["figures"][0] == {
        "name": "speed", "value": 90, "unit": "%", "at_least": 85, "at_most": None, "met": True,
    }  # fmt: skip


def test_a_chosen_part_comes_with_its_checks() -> None:
    assert [part.name for part in gpu.chosen(["generate_batch"])] == [
        "kernels", "copy bandwidth", "models", "8B decode", "8B throughput", "generate_batch",
    ]  # fmt: skip
    assert {name for part in gpu.PARTS for name in part.needs} <= {part.name for part in gpu.PARTS}


def test_every_speed_stands_on_a_check() -> None:
    for part in gpu.PARTS:
        checks = {one.name for one in gpu.chosen([part.name])} & {gpu.KERNELS, gpu.MODELS}
        assert checks or part.name == gpu.BANDWIDTH


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device on this machine")
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_the_check_of_kernels_passes_and_can_be_red(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check_on("cpu")
    right = kernels.rms_norm
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
    with pytest.raises(WrongError, match="the probe refuses CudaDecoder"):
        models.check_on("cpu", "tiny", TINY)


def test_steps_are_measured_one_after_the_other() -> None:
    module = models.build(LlamaConfig(**(TINY.to_dict() | {"max_position_embeddings": 2048})), torch.float32, "cpu")
    model = models.model_of(module, "tiny")
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
