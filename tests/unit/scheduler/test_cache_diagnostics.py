"""A scripted conversation: why less of an earlier prompt was reused, in both vendors' words and in the cache's."""

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos.execution.v1 import execution_pb2
from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.guard import Guard
from protos.rpc.identity import Role
from scheduler.frontend import comparisons
from scheduler.frontend.comparisons import RecentResponses, parts_of
from scheduler.request import CacheOptions, PromptParts, Request
from tests.support.generation import Output, generate
from tests.support.keyring import Keyring
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.http import Answer, ask, serve
from tests.support.scheduler.process import scheduler
from tests.support.scheduler.stack import Stack, StackFactory, prompt_of
from tests.support.scheduler.tokenizers import CHAT_TEMPLATE

SYSTEM = {"role": "system", "content": "the cat sat on the mat"}
QUESTION = {"role": "user", "content": "and the dog sat on the cat"}
FOLLOW_UP = {"role": "user", "content": "and the mat"}
# It reads tools and a variable.
TEMPLATE = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{{ style }}" + CHAT_TEMPLATE
BLOCK = 4


class Caller:
    """One tenant's requests over HTTP."""

    def __init__(self, address: str, token: str = "") -> None:
        self._address = address
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    async def answer(self, path: str, **fields: Any) -> Answer:
        body = json.dumps({"max_tokens": 3, "temperature": 0} | fields)
        return await ask(self._address, "POST", f"/v1/{path}", body, self._headers)

    async def say(self, *messages: dict[str, Any], to: str = "", **fields: Any) -> dict[str, Any]:
        """A conversation, compared with the response of a name in both vendors' shapes."""
        if to:
            fields["prompt_cache_options"] = fields.get("prompt_cache_options", {}) | {"comparison_response_id": to}
            fields["diagnostics"] = {"previous_message_id": to}
        answer = await self.answer("chat/completions", messages=messages, **fields)
        assert answer.status == 200, answer.body
        return dict(json.loads(answer.body))

    async def fill(self, request_id: str = "", seed: int = 1) -> None:
        """Takes every block, so that all that can be evicted is."""
        named = {"request_id": request_id} if request_id else {}
        answer = await self.answer("completions", prompt=prompt_of(390, seed), **named)
        assert answer.status == 200, answer.body


def words(answer: dict[str, Any]) -> tuple[str, str | None, str | None]:
    """What OpenAI, Anthropic and the cache call it."""
    openai, anthropic = answer["prompt_cache_diagnostics"], answer["diagnostics"]
    theirs = None if anthropic is None else anthropic["cache_miss_reason"]["type"]
    return openai.get("reason", openai["type"]), theirs, answer["kvkeep"]["reason"]


@contextlib.asynccontextmanager
async def callers(
    run_stack: StackFactory, keyring: Keyring, template: str = CHAT_TEMPLATE
) -> AsyncIterator[tuple[Caller, Caller]]:
    """Two tenants of one stack, which has an adapter."""
    executor = FakeExecutor()
    executor.chat_template = template
    executor.adapters["sql"] = execution_pb2.Adapter(name="sql", adapter_id=7, rank=8)
    for tenant in ("acme", "globex"):
        keyring.add(Role.CALLER, tenant)
    acme, globex = keyring.tokens.values()
    async with (
        run_stack(executor=executor) as stack,
        serve(stack.scheduler.service, guard=Guard(keyring.file, None)) as address,
    ):
        yield Caller(address, acme), Caller(address, globex)


async def test_what_a_caller_has_changed_is_said(run_stack: StackFactory, keyring: Keyring) -> None:
    async with callers(run_stack, keyring) as (caller, _):
        first = await caller.say(SYSTEM, QUESTION)
        assert "kvkeep" not in first
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        prompt = first["usage"]["prompt_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cache_write_tokens"] == prompt
        name, whole = first["id"], prompt // BLOCK * BLOCK
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        went_on = await caller.say(SYSTEM, QUESTION, said, FOLLOW_UP, to=name)
        assert words(went_on) == ("cache_hit", None, None)
        cached = went_on["usage"]["prompt_tokens_details"]
        assert cached["cached_tokens"] >= whole
        assert cached["cache_write_tokens"] == went_on["usage"]["prompt_tokens"] - cached["cached_tokens"]
        assert went_on["kvkeep"]["common_tokens"] == went_on["kvkeep"]["comparison_reusable_tokens"] == whole
        other = SYSTEM | {"content": "the dog"}
        table = {
            ("input_changed", "system_changed", "system_changed"): await caller.say(other, QUESTION, to=name),
            ("input_changed", "messages_changed", "input_changed"): await caller.say(
                SYSTEM, QUESTION | {"content": "日本語 and so on"}, to=name
            ),
            ("prompt_cache_key_changed", "unavailable", "salt_changed"): await caller.say(
                SYSTEM, QUESTION, to=name, cache_salt="other"
            ),
            ("model_changed", "model_changed", "model_changed"): await caller.say(
                SYSTEM, QUESTION, to=name, model="sql"
            ),
        }
        for expected, answer in table.items():
            assert words(answer) == expected
            openai = answer["prompt_cache_diagnostics"]
            missed = whole - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert openai == {
                "type": "cache_miss",
                "reason": expected[0],
                "cache_missed_tokens": missed,
                "comparison_reusable_tokens": whole,
            }
            anthropic = {"type": expected[1]}
            if expected[1] != "unavailable":
                anthropic["cache_missed_input_tokens"] = missed
            assert answer["diagnostics"] == {"cache_miss_reason": anthropic}


async def test_other_tools_and_another_template_are_told_apart_in_both_shapes(
    run_stack: StackFactory, keyring: Keyring
) -> None:
    def tools(name: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name}}]

    async with callers(run_stack, keyring, TEMPLATE) as (caller, _):
        first = await caller.say(SYSTEM, QUESTION, tools=tools("f"))
        name, whole = first["id"], first["usage"]["prompt_tokens"] // BLOCK * BLOCK
        assert words(await caller.say(SYSTEM, QUESTION, tools=tools("f"), to=name)) == ("cache_hit", None, None)
        for fields, expected in (
            ({"tools": tools("other")}, ("tools_changed", "tools_changed", "tools_changed")),
            ({"tools": tools("f"), "tool_choice": "none"}, ("tools_changed", "tools_changed", "tools_changed")),
            (
                {"tools": tools("f"), "chat_template_kwargs": {"style": "short"}},
                ("input_changed", "unavailable", "template_changed"),
            ),
        ):
            answer = await caller.say(SYSTEM, QUESTION, to=name, **fields)
            assert words(answer) == expected
            missed = whole - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert answer["prompt_cache_diagnostics"] == {
                "type": "cache_miss",
                "reason": expected[0],
                "cache_missed_tokens": missed,
                "comparison_reusable_tokens": whole,
            }
            counted = {} if expected[1] == "unavailable" else {"cache_missed_input_tokens": missed}
            assert answer["diagnostics"] == {"cache_miss_reason": {"type": expected[1]} | counted}


async def test_only_the_asked_shape_is_in_the_answer_also_in_a_stream(
    run_stack: StackFactory, keyring: Keyring
) -> None:
    async with callers(run_stack, keyring) as (caller, _):
        name = (await caller.say(SYSTEM))["id"]
        first = await caller.say(SYSTEM, diagnostics={"previous_message_id": None})
        assert first["diagnostics"] is None
        assert first.keys().isdisjoint({"kvkeep", "prompt_cache_diagnostics"})
        openai = await caller.say(SYSTEM, prompt_cache_options={"comparison_response_id": name})
        assert openai["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        assert "diagnostics" not in openai
        answer = await caller.answer(
            "chat/completions", messages=[QUESTION], stream=True, diagnostics={"previous_message_id": name}
        )
        events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
        [told] = [event for event in events if "kvkeep" in event]
        assert told["choices"][0]["finish_reason"]
        assert told["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"


async def test_an_evicted_prompt_names_requests_of_its_own_tenant_only(
    run_stack: StackFactory, keyring: Keyring
) -> None:
    async with callers(run_stack, keyring) as (caller, stranger):
        name = (await caller.say(SYSTEM, QUESTION))["id"]
        await stranger.fill("their-request", seed=2)
        answer = await caller.say(SYSTEM, QUESTION, to=name)
        # Neither vendor has a word for it: OpenAI knows changes only, and Anthropic says nothing where there is none.
        assert words(answer) == ("unavailable", None, "evicted")
        miss = answer["kvkeep"]["first_miss"]
        assert (miss["cause"], miss["token"], miss["priority"]) == ("evicted", 0, 35)
        assert (miss["for_own_request"], miss["for_request"]) == (False, None)
        assert 0 <= miss["removed_seconds_ago"] < patience(60)
        assert answer["kvkeep"]["cache_missed_tokens"] == answer["kvkeep"]["comparison_reusable_tokens"] > 0
        assert not any(word in json.dumps(answer) for word in ("their-request", "globex"))
        await caller.fill("my-request", seed=3)
        miss = (await caller.say(SYSTEM, QUESTION, to=name))["kvkeep"]["first_miss"]
        assert (miss["cause"], miss["for_own_request"], miss["for_request"]) == ("evicted", True, "my-request")


async def test_a_prompt_that_outlived_its_lease_is_no_plain_eviction(run_stack: StackFactory, keyring: Keyring) -> None:
    async with callers(run_stack, keyring) as (caller, stranger):
        kept = {"prompt_cache_options": {"ttl": 0.2}}
        name = (await caller.say(SYSTEM, QUESTION, **kept))["id"]
        # Within the lease nothing of it is evicted.
        await stranger.answer("completions", prompt=prompt_of(200, 2))
        assert words(await caller.say(SYSTEM, QUESTION, to=name, **kept)) == ("cache_hit", None, None)
        await asyncio.sleep(0.3)
        await stranger.fill(seed=4)
        assert words(await caller.say(SYSTEM, QUESTION, to=name)) == ("unavailable", None, "lease_ended")


async def test_a_response_is_found_by_its_own_tenant_only(run_stack: StackFactory, keyring: Keyring) -> None:
    async with callers(run_stack, keyring) as (caller, stranger):
        name = (await caller.say(SYSTEM, QUESTION))["id"]
        not_found = ("comparison_response_not_found", "previous_message_not_found", "comparison_not_found")
        assert words(await stranger.say(SYSTEM, QUESTION, to=name)) == not_found
        assert words(await caller.say(SYSTEM, QUESTION, to="chatcmpl-none")) == not_found


def compared(
    prompt: list[int], to: str = "", parts: pb.PromptParts | None = None, **cache: Any
) -> pb.StreamGenerateRequest:
    options = pb.CacheOptions(comparison_request_id=to or None, parts=parts, **cache)
    return pb.StreamGenerateRequest(
        token_ids=pb.TokenIds(token_ids=prompt), max_tokens=2, ignore_eos=True, cache=options
    )


async def told(stack: Stack, request: pb.StreamGenerateRequest) -> pb.CacheDiagnosis:
    return (await generate(stack.stub, request, patience(30))).usage.cache_diagnosis


async def test_over_grpc_tools_and_template_are_told_apart(stack: Stack) -> None:
    def parts(name: str = "", **digests: int) -> pb.PromptParts:
        return pb.PromptParts(request_id=name, **{"tools": 1, "system": 2, "template": 3} | digests)

    prompt = prompt_of(40)
    await generate(stack.stub, compared(prompt, parts=parts("first")), patience(30))
    changed = [*prompt[:20], *prompt_of(20, 2)]
    for digests, reason in (
        ({"tools": 9, "system": 9, "template": 9}, "TOOLS"),
        ({"system": 9, "template": 9}, "SYSTEM"),
        ({"template": 9}, "TEMPLATE"),
        ({}, "INPUT"),
    ):
        found = await told(stack, compared([*changed, len(reason)], "first", parts(**digests), no_store=True))
        assert pb.CacheMissReason.Name(found.reason) == f"CACHE_MISS_REASON_{reason}_CHANGED"
        assert (found.common_tokens, found.reusable_tokens, found.missed_tokens) == (20, 40, 20)
    # What has changed without changing the prompt is no reason.
    same = await told(stack, compared([*prompt, 5], "first", parts(tools=9)))
    assert same == pb.CacheDiagnosis(outcome=pb.CACHE_OUTCOME_HIT, reusable_tokens=40, common_tokens=40)


async def test_without_tenants_a_response_is_found_under_its_own_salt_only(stack: Stack) -> None:
    await generate(
        stack.stub, compared(prompt_of(40), parts=pb.PromptParts(request_id="first"), salt="a"), patience(30)
    )
    for salt, outcome in (("a", pb.CACHE_OUTCOME_HIT), ("b", pb.CACHE_OUTCOME_COMPARISON_NOT_FOUND)):
        assert (await told(stack, compared(prompt_of(40), "first", salt=salt))).outcome == outcome


async def test_a_miss_is_explained_without_a_comparison(stack: Stack) -> None:
    async def miss(**options: Any) -> int:
        usage = (await generate(stack.stub, compared(prompt_of(40), **options), patience(30))).usage
        assert not usage.HasField("cache_diagnosis")
        return usage.prefix_miss.cause

    assert await miss(explain_miss=False) == common.MISS_CAUSE_UNSPECIFIED
    assert await miss(explain_miss=True) == common.MISS_CAUSE_UNSPECIFIED
    assert await miss(explain_miss=True, salt="s") == common.MISS_CAUSE_NEVER_STORED
    assert await miss(explain_miss=True, no_read=True) == common.MISS_CAUSE_NOT_READ


async def test_a_fleet_knows_the_responses_of_all_its_engines(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, policy="round-robin") as fleet:
        first = compared(prompt_of(40))
        first.request_id = "first"
        await generate(fleet.stub, first, patience(30))
        outputs: list[Output] = [
            await generate(fleet.stub, compared(prompt_of(40), "first"), patience(30)) for _ in range(2)
        ]
        reports = sorted((one.usage.cache_diagnosis.outcome, one.usage.prefix_miss.cause) for one in outputs)
        # The other engine has never seen the prompt.
        assert reports == [(pb.CACHE_OUTCOME_HIT, 0), (pb.CACHE_OUTCOME_MISS, 1)]


async def test_a_fleet_knows_the_weights_of_its_engines(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, 1) as fleet:
        await fleet.knows(1)
        first = compared(prompt_of(40))
        first.request_id = "first"
        await generate(fleet.stub, first, patience(30))
        await fleet.engines[0].manager.update_weights("v1")
        await fleet.knows_weights("v1")
        found = (await generate(fleet.stub, compared(prompt_of(40), "first"), patience(30))).usage.cache_diagnosis
        assert (found.outcome, found.reason) == (pb.CACHE_OUTCOME_MISS, pb.CACHE_MISS_REASON_WEIGHTS_CHANGED)
        assert (found.missed_tokens, found.common_tokens) == (40, 0)


async def test_behind_a_router_the_request_that_evicted_a_prompt_has_its_callers_name(tmp_path: Path) -> None:
    async with run_fleet(tmp_path, 1) as fleet:
        await generate(fleet.stub, compared(prompt_of(40), explain_miss=True), patience(30))
        filling = compared(prompt_of(390, 2))
        filling.request_id = "mine"
        await generate(fleet.stub, filling, patience(30))
        miss = (await generate(fleet.stub, compared(prompt_of(40), explain_miss=True), patience(30))).usage.prefix_miss
        assert (miss.cause, miss.for_id) == (common.MISS_CAUSE_EVICTED, "mine")


async def test_front_ends_in_processes_of_their_own_share_what_they_know(tmp_path: Path) -> None:
    address = free_address()
    async with scheduler(tmp_path, http_address=address, frontends=2) as running:
        await running.begin()
        async with asyncio.timeout(patience(30)):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    if (await ask(address, "GET", "/health")).status == 200:
                        break
                await asyncio.sleep(0.05)
        caller = Caller(address)
        name = (await caller.say(SYSTEM, QUESTION))["id"]
        # Each call may come to either.
        for _ in range(8):
            assert words(await caller.say(SYSTEM, QUESTION, to=name)) == ("cache_hit", None, None)
        assert words(await caller.say(SYSTEM, FOLLOW_UP, to=name))[1] == "messages_changed"


def request(name: str, to: str = "") -> Request:
    """Of two blocks."""
    prompt, sampling = array("I", range(2 * BLOCK)), execution_pb2.SamplingParams()
    return Request(name, prompt, 1, sampling, 1, 0.0, cache=CacheOptions(comparison_id=to), response_id=name)


def test_responses_are_forgotten_by_age_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    known = RecentResponses(BLOCK, lambda: now)

    def finds(name: str) -> bool:
        found = known.diagnose(request("x", to=name), 0, "").outcome
        return found != pb.CACHE_OUTCOME_COMPARISON_NOT_FOUND

    monkeypatch.setattr(comparisons, "MAX_RESPONSES", 2)
    for name in ("a", "b", "b", "c"):
        known.add(request(name), "")
    assert [finds(name) for name in "abc"] == [False, True, True]
    monkeypatch.setattr(comparisons, "MAX_BLOCKS", 3)
    known.add(request("d"), "")
    assert [finds(name) for name in "bcd"] == [False, False, True]
    now = comparisons.KEPT_SECONDS + 1
    assert not finds("d")
    assert len(known) == 0


def test_other_weights_are_what_has_changed() -> None:
    known = RecentResponses(BLOCK)
    known.add(request("a"), "v1")
    assert known.diagnose(request("x", to="a"), BLOCK, "v1").outcome == pb.CACHE_OUTCOME_HIT
    found = known.diagnose(request("x", to="a"), 0, "v2")
    assert (found.outcome, found.reason) == (pb.CACHE_OUTCOME_MISS, pb.CACHE_MISS_REASON_WEIGHTS_CHANGED)
    assert (found.missed_tokens, found.common_tokens) == (2 * BLOCK, 0)
    # What is not known has not changed.
    assert known.diagnose(request("x", to="a"), BLOCK, None).outcome == pb.CACHE_OUTCOME_HIT
    known.add(request("a"), "v2")
    assert known.diagnose(request("x", to="a"), BLOCK, "v2").outcome == pb.CACHE_OUTCOME_HIT


def test_digests_are_of_what_is_rendered_and_not_of_where_it_is_kept() -> None:
    def digests(content: str = "a", role: str = "system", *, marked: bool = False) -> PromptParts:
        message = pb.StreamGenerateRequest()
        said = message.chat.messages.add(role=role, content=content)
        message.chat.messages.add(role="user", content="b")
        if marked:
            said.cache_breakpoints.add(content_end=1)
        return parts_of(message)

    assert digests() == digests(marked=True)
    assert digests().system not in (0, digests("b").system, digests(role="developer").system)
    assert digests(role="user") == PromptParts()
    assert parts_of(pb.StreamGenerateRequest(text="x")) == PromptParts()


def test_tools_count_as_far_as_the_prompt_has_them() -> None:
    tool = '{"type": "function", "function": {"name": "%s"}}'

    def of(*names: str, **choice: object) -> PromptParts:
        chat = pb.ChatInput(
            messages=[pb.ChatMessage(role="user", content="x")],
            tools=[tool % name for name in names],
            **choice,  # type: ignore[arg-type]
        )
        return parts_of(pb.StreamGenerateRequest(chat=chat))

    assert of("a").tools != of("b").tools
    assert of("a").tools != of().tools == of("a", tool_choice=pb.TOOL_CHOICE_NONE).tools
    forced = of("a", tool_choice=pb.TOOL_CHOICE_REQUIRED, tool_name="a", single_tool_call=True)
    assert forced == of("a")
