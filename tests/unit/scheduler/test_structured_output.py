"""Forms of outputs at the scheduler: compiled before a request waits for blocks, and kept through all that happens."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from scheduler.frontend import grammars
from tests.support.generation import Output, generate, generate_samples
from tests.support.heavy_grammar import FOLLOWED, HEAVY
from tests.support.patience import patience
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.http import client, serve
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of, refusal, run

WORDS = common.StructuredOutput(regex="(ab|ba|c+ ){12,30}")
CHOICE = common.StructuredOutput(choice=common.TextChoice(texts=["left", "right"]))


def formed(prompt: list[int], form: common.StructuredOutput = WORDS, **fields: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt),
        max_tokens=120,
        structured_output=form,
        **fields,  # type: ignore[arg-type]
    )


def ends_well(output: Output) -> bool:
    return output.finish_reason == pb.FINISH_REASON_STOP and bool(re.fullmatch("(ab|ba|c+ ){12,30}", output.text))


async def test_output_has_its_form_in_all_samples_also_where_its_end_is_ignored(stack: Stack) -> None:
    outputs = await run(stack, *[formed(prompt_of(9, seed), ignore_eos=seed % 2 == 0) for seed in range(6)])
    assert all(map(ends_well, outputs))
    sampling = pb.SamplingParams(temperature=1, seed=3)
    samples = await generate_samples(stack.stub, formed(prompt_of(9), n=4, sampling=sampling), patience(30))
    assert all(map(ends_well, samples))
    assert len({sample.text for sample in samples}) > 1
    assert (await generate(stack.stub, formed(prompt_of(5), CHOICE), patience(30))).text in ("left", "right")


async def test_a_form_is_compiled_before_its_request_is_admitted(stack: Stack) -> None:
    error = await refusal(generate(stack.stub, formed([1], common.StructuredOutput(regex="(a")), patience(30)))
    assert list(error.fields) == ["structured_output.regex"]
    assert "unclosed group" in error.message
    assert stack.manager.admitted_ids == []
    for _ in range(3):
        await generate(stack.stub, formed([1], CHOICE), patience(30))
    assert stack.executor.compiled == [CHOICE]
    # Its process has none of them.
    stack.executor.restart()
    stack.manager.register()
    await generate(stack.stub, formed([1], CHOICE), patience(30))
    await generate(stack.stub, formed([1], CHOICE), patience(30))
    assert stack.executor.compiled == [CHOICE] * 2


async def test_of_very_many_forms_those_used_last_count_as_compiled(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_REMEMBERED", 2)
    forms = [common.StructuredOutput(regex=f"{letter}+") for letter in "abc"]
    for index in (0, 1, 0, 2, 0, 1):
        await generate(stack.stub, formed([1], forms[index]), patience(30))
    assert stack.executor.compiled == [forms[0], forms[1], forms[2], forms[1]]


async def test_preempted_output_keeps_its_form(run_stack: StackFactory) -> None:
    async with run_stack(executor=FakeExecutor(max_tokens=160)) as stack:
        outputs = await run(stack, *[formed(prompt_of(20, seed=i), ignore_eos=True) for i in range(6)])
        assert all(map(ends_well, outputs))
        assert sum(output.usage.preemptions for output in outputs)


async def test_output_keeps_its_form_when_the_executor_starts_again(stack: Stack) -> None:
    stack.executor.step_seconds = 0.01
    begun = asyncio.Event()
    output = asyncio.create_task(generate(stack.stub, formed(prompt_of(20)), patience(30), begun))
    await begun.wait()
    stack.executor.restart()
    stack.manager.register()
    assert ends_well(await output)


def too_complex(**fields: object) -> pb.StreamGenerateRequest:
    message = formed([1], common.StructuredOutput(grammar=HEAVY), **fields)
    message.max_tokens = FOLLOWED + 20
    return message


async def test_a_form_that_becomes_too_complex_is_an_error_and_no_end(stack: Stack) -> None:
    stack.executor.script = stack.executor.tokenizer.encode("a").ids * (FOLLOWED + 20)
    error = await refusal(generate(stack.stub, too_complex(), patience(30)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FORM_TOO_COMPLEX")
    assert f"after {FOLLOWED} tokens" in error.message
    # Output that ends before does so as usual.
    [output] = await run(stack, too_complex(stop=["aaa"]))
    assert (output.text, output.finish_reason) == ("", pb.FINISH_REASON_STOP)
    fields: dict[str, Any] = {
        "model": "fake",
        "prompt": "x",
        "max_tokens": FOLLOWED + 20,
        "extra_body": {"guided_grammar": HEAVY},
    }
    async with serve(stack.scheduler.service) as address, client(address) as caller:
        with pytest.raises(openai.BadRequestError) as caught:
            await caller.completions.create(**fields)
        assert caught.value.code == "form_too_complex"
        stream, reasons = await caller.completions.create(**fields, stream=True), set()

        async def read() -> None:
            async for chunk in stream:
                reasons.update(choice.finish_reason for choice in chunk.choices)

        with pytest.raises(openai.APIError) as streamed:
            await read()
        assert streamed.value.code == "form_too_complex"
        assert reasons == {None}


async def test_a_router_passes_forms_and_restrictions_on(tmp_path: Path) -> None:
    async with run_fleet(tmp_path) as fleet:
        assert ends_well(await generate(fleet.stub, formed(prompt_of(20)), patience(30)))
        restricted = formed(
            [1],
            CHOICE,
            sampling=pb.SamplingParams(
                logit_bias={5: 1.5}, min_tokens=2, bad_words=["cat"], allowed_token_ids=[5, 6],
                bad_token_ids=[pb.TokenIds(token_ids=[9, 8])],
            ),
        )  # fmt: skip
        await generate(fleet.stub, restricted, patience(30))
        [sampling] = [one for engine in fleet.engines for one in engine.executor.samplings if one.min_tokens]
        assert dict(sampling.logit_bias) == {5: 1.5}
        assert list(sampling.allowed_token_ids) == [5, 6]
        runs = [list(run.token_ids) for run in sampling.bad_token_ids]
        assert [9, 8] in runs
        assert [fleet.engines[0].executor.tokenizer.decode(run) for run in runs[1:]] == ["cat", " cat"]
        error = await refusal(generate(fleet.stub, formed([1], common.StructuredOutput(regex="(a")), patience(30)))
        assert list(error.fields) == ["structured_output.regex"]
        for engine in fleet.engines:
            engine.executor.script = engine.executor.tokenizer.encode("a").ids * (FOLLOWED + 20)
        error = await refusal(generate(fleet.stub, too_complex(), patience(30)))
        assert error.reason == "FORM_TOO_COMPLEX"


FORMS: dict[str, dict[str, Any]] = {
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"enum": [{"way": "left"}, {"way": "right"}]}},
        }
    },
    "structured_outputs": {"extra_body": {"structured_outputs": {"json": {"enum": [{"way": "left"}]}}}},
}


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
async def test_openais_client_gets_json(stack: Stack, fields: dict[str, Any]) -> None:
    async with serve(stack.scheduler.service) as address, client(address) as caller:
        answer = await caller.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], **fields
        )
        assert json.loads(answer.choices[0].message.content or "")["way"] in ("left", "right")
        assert answer.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError) as caught:
            await caller.completions.create(model="fake", prompt="x", extra_body={"guided_regex": "(a"})
        assert caught.value.param == "guided_regex"
