"""llama.cpp's server, asked over HTTP with token ids; its model is a GGUF file. Each request has a separate slot.

Keys and values are kept in the type of the computation: float32, or bfloat16. Nothing is kept of slots that are given
up, so that a request can only reuse the tokens that its slot had before.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jobs

# Enough for every workload: requests at once, and tokens of a prompt and its output.
SLOTS, SLOT_TOKENS = 32, 1280
START_SECONDS, POLL_SECONDS = 300.0, 0.1
HOST = "127.0.0.1"


def free_port() -> int:
    """A port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def started(model: str, dtype: str, threads: int, port: int) -> subprocess.Popen[bytes]:
    """The server, as soon as it answers."""
    kept = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    command = [str(Path(sys.prefix, "bin/llama-server")), "--model", model, "--host", HOST, "--port", str(port)]
    command += ["--threads", str(threads), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS)]
    command += ["--cache-type-k", kept, "--cache-type-v", kept, "--cache-ram", "0"]
    # The texts of tokens are numbers, so that no token waits for a second token to complete its character.
    command += ["--override-kv", "tokenizer.ggml.model=str:test"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(HOST, port, timeout=START_SECONDS)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return server
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_SECONDS)
    server.kill()
    raise RuntimeError("llama-server did not start")


class Request(threading.Thread):
    """One request, from its sending to its last token."""

    def __init__(self, port: int, slot: int, prompt: list[int], job: jobs.Job, begin: float) -> None:
        super().__init__()
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.failure = ""
        self._port, self._begin = port, begin
        self._body = json.dumps(
            {
                "prompt": prompt,
                "n_predict": job.output_tokens,
                "ignore_eos": True,
                "id_slot": slot,
                "cache_prompt": job.reuse,
                # Takes the largest logit; any other sampler would look at all logits.
                "samplers": ["top_k"],
                "top_k": 1,
                "stream": True,
                "return_tokens": True,
            }
        )

    def run(self) -> None:
        """Records every token, or the error that ends them."""
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            connection.request("POST", "/completion", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(response.read().decode(errors="replace"))
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if not event["stop"]:
                    self.tokens += event["tokens"]
                    self.times += [time.monotonic() - self._begin] * len(event["tokens"])
        except (OSError, RuntimeError, http.client.HTTPException, KeyError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            connection.close()


def main() -> None:
    """Runs jobs."""
    answers = jobs.answers()
    model, dtype, threads, _ = jobs.arguments()
    port = free_port()
    server = started(model, dtype, threads, port)

    def run(job: jobs.Job) -> jobs.Outcome:
        begin = time.monotonic()
        requests = [Request(port, slot, list(prompt), job, begin) for slot, prompt in enumerate(job.prompts)]
        for request in requests:
            request.start()
        for request in requests:
            request.join()
        if failures := [request.failure for request in requests if request.failure]:
            raise RuntimeError(failures[0])
        return [request.times for request in requests], [request.tokens for request in requests]

    try:
        jobs.serve("llama.cpp", run, answers)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
