"""Structured output: whether all outputs that end are valid, and the costs of grammars and masks.

Run it with `python -m bench structured`, or with --parts for some of them:
  suite    JSON-Schema-Test-Suite, all drafts, with random texts that the grammars allow, without a model
  outputs  outputs of the stack for schemas of several kinds, each checked by `jsonschema`
  compile  time to compile those schemas
  first    time to the first token with a grammar that is compiled already, and with free text, in turns
  itl      inter-token latency of 32 streams, half of them constrained, and of 32 free streams, in turns
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import statistics
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import jsonschema
import tokenizers

from bench.result import RESULTS, Result, add_json_argument, percentile
from bench.structured import suite
from bench.structured.schemas import Schema, schemas
from executor.core.grammars import Grammars
from executor.errors import GrammarError
from executor.models.files import find
from executor.models.tokenizer import load_tokenizer
from executor.step import Grammar, GrammarKind
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.stack import Stack, model_cache
from tests.support.generation import Output, generate_all, greedy_request

# With times as programs read them, which the package's own checker passes over.
_FORMATS = jsonschema.FormatChecker(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
for _name, _type in (("time", datetime.time), ("date-time", datetime.datetime)):
    # A format is about strings only.
    _FORMATS.checks(_name, ValueError)(
        lambda value, read=_type.fromisoformat: not isinstance(value, str) or read(value) is not None
    )
PARTS = ("suite", "outputs", "compile", "first", "itl")
STREAMS = 32


def model_grammars() -> tuple[Grammars, Any, float]:
    """Grammars of the default model's tokenizer, the tokenizer, and the seconds that reading the vocabulary took."""
    files = load_tokenizer(find("", model_cache()))
    tokenizer = tokenizers.Tokenizer.from_str(files.json.decode())
    ends = [tokenizer.token_to_id(files.special_tokens["eos_token"])] if files.special_tokens else []
    begin = time.perf_counter()
    grammars = Grammars(files.json, tokenizer.get_vocab_size(with_added_tokens=True), ends)
    return grammars, tokenizer, time.perf_counter() - begin


def run_suite() -> dict[str, Any]:
    """The suite's cases by draft."""
    grammars, tokenizer, _ = model_grammars()
    package = suite.download(RESULTS.parent / "json-schema-suite")
    figures = {}
    for draft in suite.DRAFTS:
        found = suite.check(
            package,
            draft,
            grammars,
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )
        print(f"{draft}: {dict(found.kinds)}, {len(found.faults)} faults", flush=True)
        for fault in found.faults:
            print(f"  {fault}")
        figures[draft] = {"kinds": dict(found.kinds), "faults": found.faults}
    return figures


def compile_all(asked: Sequence[Schema]) -> dict[str, Any]:
    """Compiles each schema; returns the seconds that schemas took, and the messages of refused schemas."""
    grammars, _, reading = model_grammars()
    times, refused = [], []
    for schema in asked:
        begin = time.perf_counter()
        try:
            grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
            times.append(time.perf_counter() - begin)
        except GrammarError as error:
            refused.append(error.message)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(asked[0]))
    begin = time.perf_counter()
    for _ in range(100):
        grammars.matcher(grammar)
    again = (time.perf_counter() - begin) / 100
    seconds = {"median": statistics.median(times), "p99": percentile(times, 0.99), "longest": max(times)}
    print(
        f"compiled {len(times)} of {len(asked)} schemas: median {1e3 * seconds['median']:.2f} ms, "
        f"99th percentile {1e3 * seconds['p99']:.1f} ms, longest {1e3 * seconds['longest']:.1f} ms; "
        f"reading the vocabulary {1e3 * reading:.0f} ms, a kept grammar {1e6 * again:.0f} us",
        flush=True,
    )
    told = {"compiled": len(times), "refused": refused, "tokenizer_seconds": reading, "kept_seconds": again}
    return told | {"seconds": seconds}


def constrained(prompt: Sequence[int], tokens: int, schema: Schema, **fields: object) -> pb.StreamGenerateRequest:
    """A request whose output follows a schema."""
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt),
        max_tokens=tokens,
        structured_output=common.StructuredOutput(json_schema=json.dumps(schema)),
        cache=pb.CacheOptions(no_read=True, no_store=True),
        **fields,  # type: ignore[arg-type]
    )


def check_outputs(stack: Stack, asked: Sequence[Schema], count: int, tokens: int) -> dict[str, Any]:
    """Sampled outputs of the model, and the outputs that end but are not valid."""
    luck = random.Random(1)
    chosen = [asked[number % len(asked)] for number in range(count)]
    requests = [
        constrained(
            [luck.randrange(1000, 40_000) for _ in range(16)],
            tokens,
            schema,
            sampling=pb.SamplingParams(temperature=0.8, seed=number),
        )
        for number, schema in enumerate(chosen)
    ]
    outputs = asyncio.run(generate_all(stack.scheduler, requests, concurrency=STREAMS, seconds=3600))
    ended, faults = 0, []
    for schema, output in zip(chosen, outputs, strict=True):
        if output.finish_reason != pb.FINISH_REASON_STOP:
            continue
        ended += 1
        try:
            # Numbers as they are written: a float may be rounded to a bound that the number does not reach.
            written, exact = (json.loads(text, parse_float=Decimal) for text in (output.text, json.dumps(schema)))
            jsonschema.Draft202012Validator(exact, format_checker=_FORMATS).validate(written)
        except (ValueError, jsonschema.ValidationError) as error:
            faults.append(f"{json.dumps(schema)[:200]}: {output.text[:200]}: {str(error).splitlines()[0]}")
    print(f"{count} outputs: {ended} ended, {len(faults)} of them not valid", flush=True)
    for fault in faults:
        print(f"  {fault}")
    return {"outputs": count, "ended": ended, "faults": faults}


def _first_token(stack: Stack, request: pb.StreamGenerateRequest) -> float:
    [output] = asyncio.run(generate_all(stack.scheduler, [request], concurrency=1))
    return output.token_times[0] - output.started


def measure_first(stack: Stack, schema: Schema, repeats: int) -> dict[str, Any]:
    """Seconds to the first token, in turns: free text, and a schema that is compiled already."""
    luck = random.Random(2)
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    for repeat in range(repeats + 2):
        prompt = [luck.randrange(1000, 40_000) for _ in range(64)]
        turns = {"free": greedy_request(prompt, 1, reuse=False), "constrained": constrained(prompt, 1, schema)}
        for kind in turns if repeat % 2 else reversed(turns):
            seconds = _first_token(stack, turns[kind])
            if repeat >= 2:
                times[kind].append(seconds)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    more = statistics.median(b - a for a, b in zip(times["free"], times["constrained"], strict=True))
    print(
        f"first token: free {1e3 * medians['free']:.2f} ms, constrained {1e3 * medians['constrained']:.2f} ms, "
        f"{1e3 * more:+.2f} ms",
        flush=True,
    )
    return {"seconds": medians, "more_seconds": more}


def _itl(outputs: Sequence[Output]) -> list[float]:
    return [b - a for output in outputs for a, b in zip(output.token_times, output.token_times[1:], strict=False)]


def measure_itl(stack: Stack, asked: Sequence[Schema], tokens: int, repeats: int) -> dict[str, Any]:
    """Inter-token latency of all streams, in turns: all free, half constrained, all constrained."""
    luck = random.Random(3)
    # A long array keeps a stream going; the definitions that its items refer to stay at the root.
    endless = [
        {"type": "array", "items": schema, "minItems": 50, "$defs": schema.get("$defs", {})}
        for schema in asked[: STREAMS // 2]
    ]
    shares = {"free": 0, "half": STREAMS // 2, "all": STREAMS}
    medians: dict[str, list[float]] = {kind: [] for kind in shares}
    for repeat in range(repeats + 1):
        for kind in shares if repeat % 2 else reversed(shares):
            count, requests = shares[kind], []
            for number in range(STREAMS):
                prompt = [luck.randrange(1000, 40_000) for _ in range(64)]
                if number < count:
                    requests.append(constrained(prompt, tokens, endless[number % len(endless)]))
                else:
                    requests.append(greedy_request(prompt, tokens, reuse=False))
            outputs = asyncio.run(generate_all(stack.scheduler, requests, concurrency=STREAMS))
            if repeat:
                medians[kind].append(statistics.median(_itl(outputs)))
    ratios = {
        kind: statistics.median(a / b for a, b in zip(medians[kind], medians["free"], strict=True))
        for kind in ("half", "all")
    }
    middle = {kind: statistics.median(values) for kind, values in medians.items()}
    print(
        f"{STREAMS} streams, inter-token latency: free {1e3 * middle['free']:.2f} ms, "
        f"half constrained {1e3 * middle['half']:.2f} ms ({ratios['half']:.3f}), "
        f"all constrained {1e3 * middle['all']:.2f} ms ({ratios['all']:.3f})",
        flush=True,
    )
    return {"median_seconds": middle, "ratios": ratios}


def main() -> None:
    """Runs the parts; the status is 1 if an invalid instance or output was allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--outputs", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    add_json_argument(parser)
    arguments = parser.parse_args()
    asked, figures = schemas(arguments.schemas, 7), {}
    if "suite" in arguments.parts:
        figures["suite"] = run_suite()
    if "compile" in arguments.parts:
        figures["compile"] = compile_all(asked)
    if {"outputs", "first", "itl"} & set(arguments.parts):
        settings = {"executor_dtype": arguments.dtype, "scheduler_max_running": STREAMS}
        with Stack(**settings) as stack:
            if "first" in arguments.parts:
                figures["first"] = measure_first(stack, asked[0], 20 * arguments.repeats)
            if "itl" in arguments.parts:
                figures["itl"] = measure_itl(stack, asked, 128, arguments.repeats)
            if "outputs" in arguments.parts:
                figures["outputs"] = check_outputs(stack, asked, arguments.outputs, arguments.output_tokens)
    given = {name: value for name, value in vars(arguments).items() if name != "json"}
    Result("structured", figures, given).write(arguments.json)
    faults = [fault for draft in figures.get("suite", {}).values() for fault in draft["faults"]]
    raise SystemExit(bool(faults or figures.get("outputs", {}).get("faults")))


if __name__ == "__main__":
    main()
