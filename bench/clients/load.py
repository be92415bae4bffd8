"""Programs that load a server: guidellm's sweep, aiperf's conversations, and vLLM's own benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.clients.program import Program, Target
from bench.tables import table

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
CONCURRENCY, REQUESTS = 4, 24
CONVERSATIONS, TURNS = 8, 4
# Size and seconds of the sweep, and its concurrency: the default waiting queue refuses more requests.
SWEEP_SIZE, SWEEP_SECONDS, SWEEP_CONCURRENCY = 5, 30, 128


class VllmServe(Program):
    """`vllm bench serve`: random prompts, as conversations."""

    def run(self, target: Target, folder: Path) -> dict[str, Any]:
        """Runs the benchmark and returns its figures."""
        result = folder / "result.json"
        # The `vllm` program of the CPU package does not start: it looks for its package under a different name.
        script = (
            "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
            "serve.add_cli_args(parser); serve.main(parser.parse_args())"
        )
        self.call(
            folder,
            "-c",
            script,
            *("--backend", "openai-chat", "--base-url", target.url, "--endpoint", "/v1/chat/completions"),
            *("--model", target.model, "--tokenizer", str(target.folder)),
            *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)),
            *("--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS)),
            *("--max-concurrency", str(CONCURRENCY), "--save-result", "--result-dir", str(folder)),
            *("--result-filename", result.name),
        )
        said = json.loads(result.read_text())
        names = ("completed", "failed", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
        return {name: said[name] for name in names if name in said}


class Guidellm(Program):
    """guidellm's sweep: first one stream, then as many streams as fit, then rates between the two."""

    def run(self, target: Target, folder: Path) -> dict[str, Any]:
        """Runs the sweep; returns requests and times of each part."""
        result = folder / "result.json"
        self.call(
            folder,
            "-m",
            "guidellm",
            "run",
            *("--backend", f"kind=openai_http,target={target.url},model={target.model}"),
            *("--profile", f"kind=sweep,sweep_size={SWEEP_SIZE},max_concurrency={SWEEP_CONCURRENCY}"),
            *("--constraint", f"kind=max_duration,seconds={SWEEP_SECONDS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={target.folder}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
            *("--output", f"kind=json,path={result}", "--disable-console-interactive"),
        )
        parts = {}
        for part in json.loads(result.read_text())["benchmarks"]:
            metrics, strategy = part["metrics"], part["config"]["strategy"]
            rate = strategy.get("rate")
            totals = metrics["request_totals"]
            parts[strategy["type_"] if rate is None else f"{rate:.1f}/s"] = {
                "successful": totals["successful"],
                "errored": totals["errored"],
                "requests_per_s": metrics["requests_per_second"]["successful"]["mean"],
                "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
                "ttft_p50_ms": metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p50"],
                "ttft_p99_ms": metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p99"],
                "itl_p50_ms": metrics["inter_token_latency_ms"]["successful"]["percentiles"]["p50"],
            }
        return parts

    def shown(self, figures: Mapping[str, Any]) -> str:
        columns = next(iter(figures.values()))
        rows = [[part, *(f"{value:.5g}" for value in found.values())] for part, found in figures.items()]
        return table(["", *columns], rows)


class Aiperf(Program):
    """aiperf: conversations of several turns; each request contains all earlier turns."""

    def run(self, target: Target, folder: Path) -> dict[str, Any]:
        """Runs the conversations and returns aiperf's figures."""
        self.call(
            folder,
            "-m",
            "aiperf",
            "profile",
            *("--model", target.model, "--url", target.url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", str(target.folder), "--random-seed", "1"),
            *("--conversation-num", str(CONVERSATIONS), "--conversation-turn-mean", str(TURNS)),
            *("--conversation-turn-stddev", "0", "--concurrency", str(CONCURRENCY)),
            *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--synthetic-input-tokens-stddev", "0"),
            *("--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0"),
            *("--artifact-dir", str(folder / "artifacts"), "--ui", "none"),
        )
        [result] = (folder / "artifacts").rglob("profile_export_aiperf.json")
        said = json.loads(result.read_text())
        names = {
            "requests": ("request_count", "avg"),
            "errors_percent": ("request_error_rate", "avg"),
            "output_tokens_per_s": ("output_token_throughput", "avg"),
            "ttft_p50_ms": ("time_to_first_token", "p50"),
            "ttft_p99_ms": ("time_to_first_token", "p99"),
            "itl_p50_ms": ("inter_token_latency", "p50"),
            "cached_prompt_percent": ("overall_usage_prompt_cache_read_pct", "avg"),
        }
        return {name: said[metric][value] for name, (metric, value) in names.items() if metric in said}
