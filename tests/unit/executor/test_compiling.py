"""An executor that lacks grammars, as after a restart, compiles them, but never in the device's thread."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executor.core.grammars import Grammars
from executor.models.checkpoint import load_decoder
from executor.models.load import model_of
from protos.execution.v1 import execution_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.scheduler.tokenizers import EOS, printable_tokenizer
from tests.unit.executor.running_stack import join, refused, running


def formed(regex: str) -> pb.SamplingParams:
    return pb.SamplingParams(top_p=1, repetition_penalty=1, structured_output=common.StructuredOutput(regex=regex))


async def test_a_grammar_is_compiled_before_its_step_is_given_to_the_device(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, compiled = [], Grammars._compile

    def compile_here(self: Grammars, grammar: object) -> object:
        threads.append(threading.current_thread().name)
        return compiled(self, grammar)  # type: ignore[arg-type]

    monkeypatch.setattr(Grammars, "_compile", compile_here)
    model = model_of(load_decoder(str(model_folder("llama")), torch.float32), "llama")
    async with running(model, tmp_path) as stack:
        stack.runner.grammars = Grammars(printable_tokenizer().to_str().encode(), model.vocab_size, [EOS])
        async with stack.session() as stream:
            for handle, regex in ((1, "[ab]{30}"), (2, "[ab]{30}"), (3, "c{30}")):
                assert (await stream.run(**join(handle, sampling=formed(regex)))).num_tokens
            with refused("INVALID_STEP"):
                await stream.run(**join(4, sampling=formed("(a")))
    assert len(threads) == 4
    # A grammar that cannot be compiled is tried again, to learn its fault.
    assert [name.startswith("asyncio") for name in threads] == [True, True, True, False]
