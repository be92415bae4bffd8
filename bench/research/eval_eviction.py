"""Quality of every eviction policy: how predictions change when tokens are evicted.

Run it with `make eval-eviction`. The model and its cache run here, without a server; policies act through the
executor's own engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.prose import NoTextError, even_windows, novel
from bench.research.eviction import adaptive, generation, passkey, pictures, stream, windows
from bench.research.eviction.cache import Cache
from bench.research.eviction.outputs import Outputs
from bench.research.eviction.policies import FULL, POLICIES
from bench.research.eviction.report import report, summary
from bench.result import RESULTS, Result, read
from executor.errors import ModelError
from executor.models.files import ModelFiles, find
from executor.models.forward import Model
from executor.models.load import load_model
from tests.stack import model_cache

FAILED, INTERRUPTED = 1, 130
# The records, to which --add adds; the results are their summary.
RECORDS = RESULTS / "eviction-records.json"
PROMPT, FOLLOWING = 1792, 256
PASSKEY_BUDGETS = (256, 512)
GENERATION_BUDGET = 512
_STRIDE = 5
# Parts with records for each policy; any other part is measured as a whole.
_BY_POLICY = ("windows", "passkeys", "rouge")


class Evaluation:
    """The model, the text, and what to measure."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._files: ModelFiles = find("", model_cache())
        self._model: Model = load_model(
            self._files, torch.device("cpu"), arguments.dtype, compiled_folder=model_cache() / "compiled"
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._files.source)
        self._text = self._tokenizer(novel(), add_special_tokens=False, verbose=False)["input_ids"]
        # The last token is only predicted.
        ordered = even_windows(self._text, arguments.windows, PROMPT + FOLLOWING + 1)
        # Windows measured before an interruption thus lie in all parts of the text.
        self._windows = [ordered[at] for first in range(_STRIDE) for at in range(first, len(ordered), _STRIDE)]
        self.parts: dict[str, Callable[[], Iterable[Mapping[str, Any]]]] = {
            "windows": self._measure_windows,
            "passkeys": self._measure_passkeys,
            "rouge": self._measure_rouge,
            "streams": self._measure_streams,
            "adaptive": self._measure_adaptive,
        }

    def settings(self) -> dict[str, Any]:
        """The settings that the figures depend on."""
        arguments = self._arguments
        return {
            "model": self._files.name,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "prompt": PROMPT,
            "following": FOLLOWING,
            "windows": arguments.windows,
            "budgets": arguments.budgets,
            "policies": {
                name: {str(size): str(POLICIES[name](size)) for size in arguments.budgets} for name in POLICIES
            },
            "bin": stream.BIN,
        }

    def _measure_windows(self) -> Iterable[Mapping[str, Any]]:
        arguments = self._arguments
        # The modules take longer than the compiled code, and a few windows suffice.
        outputs = Outputs(self._files, self._model.dtype) if arguments.outputs else None
        chosen = dict.fromkeys(range(arguments.outputs), outputs) if outputs else {}
        cache = Cache(self._model, PROMPT + FOLLOWING)
        return windows.measure(cache, self._windows, PROMPT, arguments.policies, arguments.budgets, chosen)

    def _measure_passkeys(self) -> Iterable[Mapping[str, Any]]:
        arguments = self._arguments
        cache = Cache(self._model, max(passkey.LENGTHS) + passkey.ANSWER_TOKENS)
        budgets = [budget for budget in PASSKEY_BUDGETS if budget in arguments.budgets]
        return passkey.measure(cache, self._tokenizer, arguments.policies, budgets, max(1, arguments.windows // 10))

    def _measure_rouge(self) -> Iterable[Mapping[str, Any]]:
        arguments = self._arguments
        prompts = [tokens[:PROMPT] for tokens in self._windows[: -(-len(self._windows) // 2)]]
        return generation.measure(self._model, self._tokenizer, prompts, arguments.policies, GENERATION_BUDGET)

    def _measure_adaptive(self) -> Iterable[Mapping[str, Any]]:
        cache = Cache(self._model, adaptive.PROMPT + adaptive.FOLLOWING)
        length = adaptive.PROMPT + adaptive.FOLLOWING
        texts = even_windows(self._text, -(-self._arguments.windows // 2), length)
        return adaptive.measure(cache, self._tokenizer, texts, -(-self._arguments.windows // 7))

    def _measure_streams(self) -> Iterable[Mapping[str, Any]]:
        length = min(16_000, 1600 * self._arguments.windows)
        return stream.measure(self._model, even_windows(self._text, self._arguments.streams, length + 1))


def follow(part: str, records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the records, and prints progress to standard error every few seconds."""
    begin = shown = time.monotonic()
    count = 0
    for count, record in enumerate(records, start=1):
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{part}: {count} figures after {shown - begin:.0f} s", file=sys.stderr, flush=True)
        yield record
    print(f"{part}: {count} figures in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures and writes the records of all parts to RECORDS, also after an interruption.

    With --add, earlier records stay. Raises ValueError if these settings cannot be compared with the earlier settings.
    """
    results: dict[str, Any] = {}
    if arguments.add and RECORDS.exists():
        results = read(RECORDS)
    if not arguments.parts:
        return results
    evaluation = Evaluation(arguments)
    results["settings"] = merged_settings(results.get("settings", {}), evaluation.settings(), arguments.policies)
    for name in arguments.parts:
        results[name] = untouched(name, results.get(name, []), arguments.policies)
        try:
            with torch.inference_mode():
                for record in follow(name, evaluation.parts[name]()):
                    results[name].append(record)
        finally:
            Result("eviction", results).write(RECORDS)
    return results


def untouched(part: str, records: Iterable[Mapping[str, Any]], policies: Collection[str]) -> list[Mapping[str, Any]]:
    """Earlier records of a part that remain when these policies are measured."""
    if part not in _BY_POLICY:
        return []
    return [record for record in records if record["policy"] not in (FULL, *policies)]


def merged_settings(before: Mapping[str, Any], now: Mapping[str, Any], policies: Collection[str]) -> dict[str, Any]:
    """The earlier results' settings, with these policies added. Raises ValueError if settings differ."""
    for name, value in now.items():
        if name != "policies" and before.get(name, value) != value:
            raise ValueError(f"--add: the results have {name} {before[name]}, not {value}: measure with the same")
    return dict(now) | {"policies": before.get("policies", {}) | {name: now["policies"][name] for name in policies}}


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Draws the available results."""
    drawn = True
    if results.get("windows"):
        drawn = pictures.budgets(results["windows"]["policies"], folder / "eviction-budgets.png")
    if results.get("streams") and results["streams"][0]["nll"]:
        drawn = pictures.streams(results["streams"], results["settings"]["bin"], folder / "eviction-stream.png")
    if results.get("adaptive"):
        drawn = pictures.adaptive_windows(results["adaptive"], folder / "eviction-adaptive.png")
    if not drawn:
        print("no pictures: matplotlib is not installed", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=[*POLICIES], metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, default=[64, 128, 256, 512, 1024], help="tokens that stay")
    parser.add_argument("--windows", type=int, default=20, help="pieces of text; the other parts shrink with them")
    parser.add_argument("--outputs", type=int, default=2, help="windows in which outputs of attention are compared")
    parser.add_argument("--streams", type=int, default=2, help="long pieces of text")
    names = ["windows", "passkeys", "rouge", "streams", "adaptive"]
    parser.add_argument("--parts", nargs="*", choices=names, default=names, help="what to measure")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--json", type=Path, default=RESULTS / "eviction.json", help="results; pictures go beside it")
    parser.add_argument("--add", action="store_true", help=f"keep other parts and policies of {RECORDS.name}")
    return parser.parse_args()


def main() -> int:
    """Measures and reports; returns the exit status."""
    arguments = _arguments()
    try:
        results = evaluate(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ModelError, NoTextError, ValueError) as error:
        print(error, file=sys.stderr)
        return FAILED
    settings = results.pop("settings", {})
    kept = Result("eviction", summary(results), settings | {"policies": [*settings.get("policies", ())]})
    kept.write(arguments.json)
    print(report(kept.values()))
    draw(kept.values(), arguments.json.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
