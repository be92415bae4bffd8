"""`python -m scheduler.generate "prompt"`: streams an answer to the terminal, or shows several answers."""

import os
import sys
import time
from typing import Annotated

import grpc
import typer

from protos.generation.v1 import generation_pb2 as pb
from protos.generation.v1 import generation_pb2_grpc as rpc
from protos.rpc.channel import open_sync_channel
from protos.rpc.errors import RemoteError, from_rpc_error
from protos.rpc.security import PLAIN, Security
from protos.rpc.settings import ProcessSettings, load

DEFAULT_ADDRESS = "127.0.0.1:50051"
INTERRUPTED = 130

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
    address: Annotated[str, typer.Option(envvar="KVKEEP_SCHEDULER_ADDRESS", help="Where the scheduler serves.")] = (
        DEFAULT_ADDRESS
    ),
    raw: Annotated[bool, typer.Option("--raw", help="Continue the plain text instead of answering a chat.")] = False,
    system: Annotated[str, typer.Option(help="System message of the chat.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the most likely tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    n: Annotated[
        int, typer.Option("--n", min=1, help="Number of answers; they differ only if --temperature is above 0.")
    ] = 1,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")] = 600.0,
) -> None:
    """Streams the model's answer to standard output, and prints token counts and times to standard error."""
    request = pb.StreamGenerateRequest(
        max_tokens=max_tokens,
        sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
        stop=stop or [],
        n=n,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw:
        request.text = text
    else:
        if system:
            request.chat.messages.add(role="system", content=system)
        request.chat.messages.add(role="user", content=text)
    raise typer.Exit(run(address, request, timeout, load(ProcessSettings, os.environ).security))


def run(address: str, request: pb.StreamGenerateRequest, timeout: float, security: Security = PLAIN) -> int:
    """Streams a single answer, or shows each of several answers when it is complete; returns the exit status."""
    started = time.monotonic()
    first, received, usage = None, 0, pb.Usage()
    texts = [""] * request.n
    with open_sync_channel(address, security) as channel:
        stub: rpc.GenerationServiceStub = rpc.GenerationServiceStub(channel)
        call = stub.StreamGenerate(request, timeout=timeout)
        try:
            for response in call:
                if response.token_ids and first is None:
                    first = time.monotonic()
                received += len(response.token_ids)
                if request.n == 1:
                    typer.echo(response.text, nl=False)
                texts[response.sample_index] += response.text
                if not response.finish_reason:
                    continue
                if request.n > 1:
                    typer.echo(f"--- {response.sample_index + 1} of {request.n}")
                    typer.echo(texts[response.sample_index], nl=False)
                typer.echo()
                usage.prompt_tokens += response.usage.prompt_tokens
                usage.cached_tokens += response.usage.cached_tokens
                usage.output_tokens += response.usage.output_tokens
                usage.host_tokens += response.usage.host_tokens
                usage.disk_tokens += response.usage.disk_tokens
            typer.echo(summary(usage, started, first or started, time.monotonic()), err=True)
        except KeyboardInterrupt:
            call.cancel()
            typer.echo("\ncancelled", err=True)
            return INTERRUPTED
        except grpc.RpcError as error:
            if received and request.n == 1:
                typer.echo()
            typer.echo(explain(from_rpc_error(error), address, received), err=True)
            return 1
    return 0


def summary(usage: pb.Usage, started: float, first: float, ended: float) -> str:
    """Returns one line: tokens, time to first token and speed of all answers together, as seen by the client."""
    later = usage.output_tokens - 1
    speed = f"{later / (ended - first):.1f}" if later > 0 and ended > first else "-"
    tiers = {"host memory": usage.host_tokens, "disk": usage.disk_tokens}
    below = ", ".join(f"{tokens} from {tier}" for tier, tokens in tiers.items() if tokens)
    return (
        f"cached {usage.cached_tokens}{below and f' ({below})'} · "
        f"prompt {usage.prompt_tokens} · output {usage.output_tokens} tokens · "
        f"TTFT {(first - started) * 1000:.0f} ms · {speed} tokens/s"
    )


def explain(error: RemoteError, address: str, received: int) -> str:
    """Describes an error for people, in one line. received: tokens that came before it."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        if received:
            return f"error: the connection broke after {received} tokens"
        return f"error: no answer at {address}: is the stack running? make run-stack"
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "error: the answer took too long (--timeout)"
    return f"error: {error.message}"


def main() -> None:
    """Runs the command; a reader that closes its end of the pipe, as `| head` does, is no error."""
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
