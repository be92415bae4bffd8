"""Checks that third-party routers serve requests with two real engines behind them.

`make peers ARGS="dynamo smg"` installs them first. smg sends 24 requests that come at once, and then the same prompts
one after the other. dynamo's indexer and its selection service follow the events of both engines. For each prompt that
one engine has cached, this engine must be selected, and then answers. Each answer must equal an engine's answer to the
same request without a router, in float32, with as many cached tokens. Exits with 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import NamedTuple

from bench.peers.routers import Connection, RouterError, RouterProcess
from bench.peers.set_up import DYNAMO, SMG, default_folder
from bench.result import Result, add_json_argument
from bench.tables import table
from tests.stack import Stack, metrics
from tests.support.patience import patience
from tests.support.ports import free_address

ENGINES, AT_ONCE, OF_EACH_ENGINE = 2, 24, 12
WORDS = ("the", "a", "river", "stone", "bird", "house", "walks", "sees", "under", "old", "green", "and", "where", "far")
PROMPT_WORDS, ANSWER_TOKENS = (40, 240), 24
# A router's name of the model, which may differ from the engines' name.
MODEL, BLOCK = "m", 16
# The salt of the engines' own answers, so that no other request finds their blocks.
OWN = "an engine by itself"
PATIENCE_SECONDS = patience(10)


class Answer(NamedTuple):
    """Text with its tokens, as the engine spells them, and tokens of the prompt that had been cached."""

    text: str
    tokens: tuple[str, ...]
    prompt_tokens: int
    cached: int

    def output(self) -> tuple[str, tuple[str, ...]]:
        return self.text, self.tokens


class Engine:
    """An engine: a separate stack that publishes its events."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.http, self.events, self.replays, self._metrics = (free_address() for _ in range(4))
        self.stack = Stack(
            scheduler_http_address=self.http,
            scheduler_metrics_address=self._metrics,
            cachemgr_zmq_events=self.events,
            cachemgr_zmq_replays=self.replays,
            cachemgr_zmq_token_ids=1,
            executor_block_size=BLOCK,
            executor_threads=1,
        )

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def model(self) -> str:
        """The model's name at this engine."""
        with Connection(self.http) as connection:
            return connection.get("/v1/models")["data"][0]["id"]

    def tokens(self, prompt: str, model: str) -> list[int]:
        """The prompt's token ids."""
        with Connection(self.http) as connection:
            return connection.post("/tokenize", prompt=prompt, model=model)["tokens"]

    def requests(self) -> int:
        """Requests that have ended at this engine."""
        return int(sum(value for name, _, value in metrics(self._metrics) if name == "kvkeep_scheduler_requests_total"))


class Found(NamedTuple):
    """Counts of one kind of request: how many were sent, and how many got the answer that they must get."""

    sent: int
    # Requests with any answer, with an engine's own answer, and with the engine's own number of cached tokens.
    answered: int
    equal: int
    cached: int
    cached_tokens: int
    # Requests that each engine has answered.
    engines: list[int]

    def is_right(self) -> bool:
        return self.sent == self.answered == self.equal == self.cached


def prompt(seed: int) -> str:
    """A prompt that differs from all other prompts in its first token."""
    random = Random(seed)
    return f"{ascii_letters[seed]} " + " ".join(random.choices(WORDS, k=random.randint(*PROMPT_WORDS)))


def ask(address: str, model: str, text: str, **fields: object) -> Answer:
    """A greedy completion. Raises RouterError and OSError."""
    with Connection(address) as connection:
        found = connection.post(
            "/v1/completions",
            model=model,
            prompt=text,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            logprobs=1,
            ignore_eos=True,
            **fields,
        )
    [choice], usage = found["choices"], found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(choice["text"], tuple(choice["logprobs"]["tokens"]), usage["prompt_tokens"], cached)


def own_answers(engine: Engine, model: str, prompts: Sequence[str]) -> tuple[list[Answer], list[Answer]]:
    """The engine's own answers, without and with the prompt in its cache. Other requests do not find these blocks."""
    first, second = ([ask(engine.http, model, text, cache_salt=OWN) for text in prompts] for _ in range(2))
    return first, second


def compared(answers: Sequence[Answer | str], own: Sequence[Answer], engines: list[int]) -> Found:
    """Compares answers, or errors in words, with an engine's own answers."""
    pairs = [(answer, right) for answer, right in zip(answers, own, strict=True) if isinstance(answer, Answer)]
    for answer in answers:
        if isinstance(answer, str):
            print(answer, file=sys.stderr)
    return Found(
        len(answers),
        len(pairs),
        sum(answer.output() == right.output() for answer, right in pairs),
        sum(answer.cached == right.cached for answer, right in pairs),
        sum(answer.cached for answer, _ in pairs),
        engines,
    )


def attempt(address: str, model: str, text: str) -> Answer | str:
    """The answer, or the error in words."""
    try:
        return ask(address, model, text)
    except (RouterError, OSError, http.client.HTTPException, KeyError) as error:
        return f"no answer: {error!r}"


@contextlib.contextmanager
def counted(engines: Sequence[Engine]) -> Iterator[list[int]]:
    """Yields a list that has, after the with statement, how many requests each engine has answered within it."""
    before, found = [engine.requests() for engine in engines], list[int]()
    yield found
    found += [engine.requests() - first for engine, first in zip(engines, before, strict=True)]


def smg(folder: Path, engines: Sequence[Engine], model: str) -> dict[str, Found]:
    """Requests through smg."""
    prompts = [prompt(number) for number in range(AT_ONCE)]
    first, second = own_answers(engines[0], model, prompts)
    address, prometheus = free_address(), free_address()
    command = [str(folder / SMG.name / "bin/smg"), "launch", "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", address.partition(":")[2]]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", prometheus.partition(":")[2]]
    command += ["--worker-urls", *(engine.url for engine in engines)]
    found = {}
    with RouterProcess(command, address, folder / "cache/smg.log") as router:
        router.wait()
        wait_for("smg knows both engines", lambda: healthy(router) == len(engines))
        with ThreadPoolExecutor(AT_ONCE) as threads, counted(engines) as taken:
            answers = list(threads.map(lambda text: attempt(address, model, text), prompts))
        found[f"smg, {AT_ONCE} at once"] = compared(answers, first, taken)
        with counted(engines) as taken:
            answers = [attempt(address, model, text) for text in prompts]
        found["smg, the same one after the other"] = compared(answers, second, taken)
    return found


def healthy(router: Connection) -> int:
    """The number of engines that smg sends requests to."""
    return sum(worker["is_healthy"] for worker in router.get("/workers")["workers"])


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    """Waits until the condition holds. Raises RouterError."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise RouterError(f"not within {PATIENCE_SECONDS:.0f} seconds: {what}")
        time.sleep(0.1)


def dynamo(folder: Path, engines: Sequence[Engine], model: str) -> tuple[dict[str, Found], dict[str, int]]:
    """Sends requests to the engines that dynamo selects; also returns how often the selection was right."""
    prompts = [prompt(AT_ONCE + number) for number in range(ENGINES * OF_EACH_ENGINE)]
    _, own = own_answers(engines[0], model, prompts)
    homes = [number % ENGINES for number in range(len(prompts))]
    with contextlib.ExitStack() as exits:
        indexer, selecting = (exits.enter_context(started(folder, name)) for name in ("indexer", "select_service"))
        for engine in engines:
            register(indexer, selecting, engine)
        # The routers follow the engines while the engines compute the prompts.
        for home, text in zip(homes, prompts, strict=True):
            ask(engines[home].http, model, text)
        ids = [engines[0].tokens(text, model) for text in prompts]
        expected = [{home: len(tokens) // BLOCK * BLOCK} for home, tokens in zip(homes, ids, strict=True)]
        wait_for("the indexer finds each prompt where it is", lambda: [held(indexer, one) for one in ids] == expected)
        wait_for("so does the selection", lambda: [scored(selecting, one) for one in ids] == expected)
        answers, selected = list[Answer | str](), list[int]()
        with counted(engines) as taken:
            for text, tokens in zip(prompts, ids, strict=True):
                choice = selecting.post("/select", model_name=MODEL, token_ids=tokens)
                selected.append(choice["worker_id"])
                answers.append(attempt(choice["endpoint"].removeprefix("http://"), model, text))
    right = sum(home == number for home, number in zip(homes, selected, strict=True))
    tokens_found = sum(sum(one.values()) for one in expected)
    figures = {"prompts": len(prompts), "tokens_found_by_the_indexer": tokens_found, "right": right}
    return {"dynamo, each to the selected engine": compared(answers, own, taken)}, figures


def started(folder: Path, name: str) -> RouterProcess:
    """One of dynamo's services, which listens on all addresses of this machine."""
    address = free_address()
    command = [str(DYNAMO.python(folder)), "-m", f"dynamo.{name}", "--threads", "1"]
    command += ["--port", address.partition(":")[2]]
    router = RouterProcess(command, address, folder / f"cache/dynamo-{name}.log")
    try:
        router.wait()
    except BaseException:
        router.close()
        raise
    return router


def register(indexer: Connection, selecting: Connection, engine: Engine) -> None:
    """Makes an engine known to both services."""
    events = f"tcp://{engine.events}"
    common: dict[str, object] = {
        "model_name": MODEL,
        "block_size": BLOCK,
        "replay_endpoint": f"tcp://{engine.replays}",
    }
    indexer.post("/register", instance_id=engine.number, endpoint=events, **common)
    selecting.post(
        "/workers",
        worker_id=engine.number,
        endpoint=engine.url,
        kv_events_endpoint=events,
        data_parallel_size=1,
        data_parallel_start_rank=0,
        max_num_batched_tokens=512,
        total_kv_blocks=4096,
        **common,
    )


def held(indexer: Connection, tokens: list[int]) -> dict[int, int]:
    """The number of the prompt's tokens on each engine's device, without engines that have none."""
    found = indexer.post("/query", model_name=MODEL, token_ids=tokens)["instances"]
    return {int(number): tiers["gpu"] for number, tiers in found.items() if tiers.get("gpu")}


def scored(selecting: Connection, tokens: list[int]) -> dict[int, int]:
    """The same numbers, from the selection service."""
    workers = selecting.post("/overlap_scores", model_name=MODEL, token_ids=tokens)["workers"]
    return {one["worker_id"]: one["device_blocks"] * BLOCK for one in workers if one["device_blocks"]}


def main() -> int:
    """Runs both routers and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="folder of the environments of `make peers`"
    )
    add_json_argument(parser)
    given = parser.parse_args()
    for peer in (SMG, DYNAMO):
        if reason := peer.missing(given.folder):
            print(f"{peer.name}: {reason}", file=sys.stderr)
            return 2
    begun = time.monotonic()
    engines = [Engine(number) for number in range(ENGINES)]
    try:
        with contextlib.ExitStack() as exits:
            for engine in engines:
                exits.enter_context(engine.stack)
            model = engines[0].model()
            found = smg(given.folder, engines, model)
            by_dynamo, selections = dynamo(given.folder, engines, model)
            found |= by_dynamo
    except RouterError as error:
        print(f"peer-routers: {error}", file=sys.stderr)
        return 1
    header = ["", "sent", "answered", "engine's own\nanswer", "its cached\ntokens", "cached", "by engine"]
    rows = [[name, *map(str, one[:-1]), " + ".join(map(str, one.engines))] for name, one in found.items()]
    print(table(header, rows))
    print("\ndynamo selected the engine that has the prompt for {right} of {prompts}".format(**selections))
    kept = {
        "requests": {name: one._asdict() for name, one in found.items()},
        "selections": selections,
        "seconds": time.monotonic() - begun,
    }
    settings = {"engines": ENGINES, "model": model, "routers": [*SMG.requirements, *DYNAMO.requirements]}
    print(f"figures: {Result('peer_routers', kept, settings).write(given.json)}")
    is_right = all(one.is_right() for one in found.values()) and selections["right"] == selections["prompts"]
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
