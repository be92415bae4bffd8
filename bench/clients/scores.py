"""Scores from lm-eval, of the stack over HTTP and of transformers, and the loss by each eviction policy.

The tasks are small and generated here. They use facts that the model knows, a name far back in a long text, the novel
of `bench/prose.py`, and words to repeat in a conversation.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from bench.clients.program import Program, Target
from bench.prose import novel
from bench.tables import table
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kvcache_rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Russia": "Moscow",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Sweden": "Stockholm",
    "Norway": "Oslo",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Ireland": "Dublin",
    "Hungary": "Budapest",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Canada": "Ottawa",
}
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
# The answer to each question is one of these colours; the wrong choices are the colours of other people.
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown", "pink")
FAR_TASKS, NOVEL_TASKS, COPIES = 16, 6, 16
# Characters of the novel around a requested name, and in a piece whose perplexity is measured.
FAR_CHARACTERS, PIECE_CHARACTERS = 4_500, 6_000
CHOICE_METRICS, PERPLEXITY_METRICS, COPY_METRICS = ("acc", "acc_norm"), ("word_perplexity",), ("exact_match",)
# Tokens that a policy keeps: the rest is evicted while the prompt is computed.
KEPT = 256
POLICIES: Mapping[str, common.EvictionPolicy] = {
    kind: common.EvictionPolicy(kind=f"EVICTION_KIND_{kind.upper()}", during_prefill=True, start_tokens=16, **sizes)
    for kind, sizes in {
        "sliding_window": {"recent_tokens": KEPT - 16},
        "average": {"recent_tokens": 64, "max_cache_tokens": KEPT},
        "h2o": {"recent_tokens": 64, "max_cache_tokens": KEPT},
    }.items()
}


class Task(NamedTuple):
    """One task: its documents, and how lm-eval reads them."""

    name: str
    documents: Sequence[Mapping[str, Any]]
    fields: Mapping[str, Any]
    metrics: Sequence[str]

    def write(self, folder: Path) -> None:
        """The task as files of lm-eval."""
        data = folder / f"{self.name}.json"
        data.write_text(json.dumps(self.documents))
        # JSON is YAML.
        described = {
            "task": self.name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **self.fields,
            "metric_list": [{"metric": metric} for metric in self.metrics],
            "metadata": {"version": 1},
        }
        (folder / f"{self.name}.yaml").write_text(json.dumps(described))


class Scored(NamedTuple):
    """What lm-eval reports: metrics by task, and the model's answers to each document."""

    metrics: dict[str, dict[str, float]]
    answers: dict[str, list[list[str]]]


def tasks() -> list[Task]:
    """The tasks, always with the same documents. Raises NoTextError."""
    rng, text = random.Random(1), novel()
    facts = [
        {
            "question": f"The capital of {country} is",
            "choices": (choices := [capital, *rng.sample([one for one in CAPITALS.values() if one != capital], 3)]),
            "answer": choices.index(capital),
        }
        for country, capital in CAPITALS.items()
    ]
    far = [_far(rng, text) for _ in range(FAR_TASKS)]
    pieces = [{"text": _piece(rng, text, PIECE_CHARACTERS)} for _ in range(NOVEL_TASKS)]
    copies = [{"word": word} for word in rng.sample(list(CAPITALS.values()), COPIES)]
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    }
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    copy = {
        "output_type": "generate_until",
        "doc_to_text": "Say this word and nothing else: {{word}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
    }
    return [
        Task("facts", facts, choice, CHOICE_METRICS),
        Task("far", far, choice, CHOICE_METRICS),
        Task("novel", pieces, rolling, PERPLEXITY_METRICS),
        Task("copies", copies, copy, COPY_METRICS),
    ]


def _far(rng: random.Random, text: str) -> dict[str, Any]:
    """Makes a question about who wears which colour; the answer stands between two pieces of the novel."""
    name, *_ = people = rng.sample(NAMES, 4)
    colour, *_ = colours = rng.sample(COLOURS, 4)
    said = " ".join(f"The hat of {who} is {hat}." for who, hat in zip(people, colours, strict=True))
    before, behind = _piece(rng, text, FAR_CHARACTERS // 3), _piece(rng, text, 2 * FAR_CHARACTERS // 3)
    choices = rng.sample(colours, 4)
    return {
        "question": f"{before}\n\n{said}\n\n{behind}\n\nThe hat of {name} is",
        "choices": choices,
        "answer": choices.index(colour),
    }


def _piece(rng: random.Random, text: str, characters: int) -> str:
    begin = text.index(" ", rng.randrange(len(text) - characters - 100)) + 1
    return text[begin : text.rindex(" ", begin, begin + characters)]


class LmEval(Program):
    """lm-eval: log-likelihoods and answers of the stack and of transformers."""

    def run(self, target: Target, folder: Path) -> dict[str, Any]:
        """Returns scores of the stack and of transformers, their differences, and the scores with each policy."""
        made = tasks()
        for task in made:
            task.write(folder)
        scored = [task.name for task in made if task.name != "copies"]
        server = f"model={target.model},tokenizer={target.folder},max_retries=1,num_concurrent=4"
        completions = f"base_url={target.url}/v1/completions,{server},max_length=2048"
        chat = f"base_url={target.url}/v1/chat/completions,{server}"
        local = f"pretrained={target.folder},dtype=float32,max_length=2048"
        expected = self._score(folder, "transformers", "hf", local, scored)
        found = self._score(folder, "stack", "local-completions", completions, scored)
        said_expected = self._score(folder, "transformers-chat", "hf", local, ["copies"], "--apply_chat_template")
        said = self._score(folder, "stack-chat", "local-chat-completions", chat, ["copies"], "--apply_chat_template")
        policies = {}
        for name, policy in POLICIES.items():
            with _ruled(target.admin, policy):
                policies[name] = self._score(folder, name, "local-completions", completions, ["far", "novel"]).metrics
        return {
            "transformers": expected.metrics | said_expected.metrics,
            "stack": found.metrics | said.metrics,
            "furthest_log_likelihood": max(
                abs(float(one) - float(other))
                for task in scored
                for ours, theirs in zip(found.answers[task], expected.answers[task], strict=True)
                for one, other in zip(ours, theirs, strict=True)
            ),
            "equal_answers": [sum(map(eq, said.answers["copies"], said_expected.answers["copies"])), COPIES],
            "policies": policies,
        }

    def shown(self, figures: Mapping[str, Any]) -> str:
        columns = {name: figures[name] for name in ("transformers", "stack")} | dict(figures["policies"])
        rows = [
            [f"{task} {metric}", *(f"{one[task][metric]:.4f}" if task in one else "" for one in columns.values())]
            for task, metrics in figures["stack"].items()
            for metric in metrics
        ]
        equal, count = figures["equal_answers"]
        return (
            f"{table(['', *columns], rows)}\n"
            f"log-likelihoods differ by {figures['furthest_log_likelihood']:.1e} at most, "
            f"{equal} of {count} answers equal those of transformers"
        )

    def _score(self, folder: Path, place: str, kind: str, model: str, names: Sequence[str], *more: str) -> Scored:
        output = folder / place
        arguments = ["--model", kind, "--model_args", model, "--tasks", ",".join(names), "--include_path", str(folder)]
        self.call(folder, "-m", "lm_eval", *arguments, "--output_path", str(output), "--log_samples", *more)
        [results] = output.rglob("results_*.json")
        said = json.loads(results.read_text())["results"]
        metrics = {
            task: {
                name.removesuffix(",none"): value
                for name, value in said[task].items()
                if isinstance(value, float) and "stderr" not in name
            }
            for task in names
        }
        answers = {}
        for task in names:
            [samples] = output.rglob(f"samples_{task}_*.jsonl")
            documents = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda one: one["doc_id"])
            answers[task] = [[str(_first(one)) for one in document["resps"]] for document in documents]
        return Scored(metrics, answers)


def _first(answer: Any) -> Any:
    """Returns the first text or log-likelihood in nested lists."""
    while isinstance(answer, list):
        answer = answer[0]
    return answer


@contextlib.contextmanager
def _ruled(admin: str, policy: common.EvictionPolicy) -> Iterator[None]:
    """Applies this policy to every request within the with statement."""
    with grpc.insecure_channel(admin) as channel:
        stub: kvcache_rpc.CacheAdminServiceStub = kvcache_rpc.CacheAdminServiceStub(channel)
        rule = kv.RetentionRule(name="policy", action=kv.RuleAction(eviction_policy=policy))
        stub.CreateRetentionRule(kv.CreateRetentionRuleRequest(rule=rule), timeout=10)
        try:
            yield
        finally:
            stub.DeleteRetentionRule(kv.DeleteRetentionRuleRequest(name="policy"), timeout=10)
