"""The names that requests may call the model, and the one that answers show."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.guard import Guard
from protos.rpc.settings import SettingsError, load
from scheduler.router.settings import RouterSettings
from scheduler.settings import SchedulerSettings
from tests.support.generation import generate
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.support.scheduler.fake_executor import FakeExecutor
from tests.support.scheduler.fleet import run_fleet
from tests.support.scheduler.http import LEAST, ask, serve
from tests.support.scheduler.process import scheduler
from tests.support.scheduler.stack import StackFactory, refusal

NAMES = ("gpt-4o", "acme/small")
SETTING = "KVKEEP_SCHEDULER_SERVED_MODEL_NAMES"


async def check(address: str) -> None:
    """A server whose model has these names."""
    listed = json.loads((await ask(address, "GET", "/v1/models")).body)["data"]
    assert [card["id"] for card in listed] == list(NAMES)
    for name in ("", *NAMES):
        answer = json.loads((await ask(address, "POST", "/v1/completions", json.dumps(LEAST | {"model": name}))).body)
        assert answer["model"] == NAMES[0]
    for name in NAMES:
        card = json.loads((await ask(address, "GET", f"/v1/models/{name}")).body)
        assert (card["id"], card["parent"]) == (name, None)
    for name in ("fake", "other"):
        assert (await ask(address, "GET", f"/v1/models/{name}")).status == 404
        answer = await ask(address, "POST", "/v1/completions", json.dumps(LEAST | {"model": name}))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert "'gpt-4o' and 'acme/small'" in answer.error["message"]
    info = json.loads((await ask(address, "GET", "/server_info")).body)
    assert (info["served_model_name"], "fake" in json.dumps(info)) == (NAMES[0], False)


async def test_a_model_is_called_by_any_of_its_names(run_stack: StackFactory) -> None:
    async with run_stack(served_model_names=",".join(NAMES)) as stack, serve(stack.scheduler.service) as address:
        await check(address)
        assert (await stack.stub.GetModel(pb.GetModelRequest())).model == NAMES[0]
        asked = pb.StreamGenerateRequest(text="the cat", max_tokens=2, model=NAMES[1])
        assert (await generate(stack.stub, asked, patience(30))).token_ids
        asked.model = "fake"
        assert (await refusal(generate(stack.stub, asked, patience(30)))).code is grpc.StatusCode.NOT_FOUND


async def test_front_ends_and_routers_have_names_of_their_own(tmp_path: Path) -> None:
    address = free_address()
    (tmp_path / "scheduler").mkdir()
    async with scheduler(
        tmp_path / "scheduler", http_address=address, frontends=1, served_model_names=",".join(NAMES)
    ) as running:
        await running.begin()
        await check(address)
    (tmp_path / "fleet").mkdir()
    async with run_fleet(tmp_path / "fleet", 1, http_address="127.0.0.1:0", served_model_names=NAMES) as fleet:
        server = fleet.router.http_server(Guard(None, None))
        assert server is not None
        await server.start()
        await check(server.address)
        await server.stop()


async def test_a_model_is_called_by_its_id_on_a_hub_too(run_stack: StackFactory) -> None:
    executor = FakeExecutor()
    executor.hub_id = "owner/fake"
    async with run_stack(executor) as stack, serve(stack.scheduler.service) as address:
        for name in ("fake", "owner/fake"):
            answer = await ask(address, "POST", "/v1/completions", json.dumps(LEAST | {"model": name}))
            assert (answer.status, json.loads(answer.body)["model"]) == (200, "fake")
            assert (await ask(address, "GET", f"/v1/models/{name}")).status == 200
        other = await ask(address, "POST", "/v1/completions", json.dumps(LEAST | {"model": "other/fake"}))
        assert (other.status, other.error["code"]) == (404, "model_not_found")


async def test_a_router_is_for_a_model_by_either_name(tmp_path: Path) -> None:
    for number, name in enumerate(("fake", "owner/fake")):
        executor = FakeExecutor()
        executor.hub_id = "owner/fake"
        (tmp_path / f"{number}").mkdir()
        async with run_fleet(tmp_path / f"{number}", 1, executors=[executor], model=name) as fleet:
            asked = pb.StreamGenerateRequest(text="the cat", max_tokens=2, model="owner/fake")
            assert (await generate(fleet.stub, asked, patience(30))).token_ids


def test_names_have_commas_between_them() -> None:
    assert load(SchedulerSettings, {SETTING: " a ,b/c,"}).served_model_names == ("a", "b/c")
    assert load(SchedulerSettings, {SETTING: ""}).served_model_names == ()
    engines = {"KVKEEP_ROUTER_ENGINES": "unix:/engine"}
    assert load(RouterSettings, engines | {"KVKEEP_ROUTER_SERVED_MODEL_NAMES": "a"}).served_model_names == ("a",)


@pytest.mark.parametrize(("value", "words"), [("a,b,a", "twice"), ("a\nb", "printable"), ("x" * 257, "256 bytes")])
def test_a_wrong_name_is_refused(value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=f"{SETTING}.*{words}"):
        load(SchedulerSettings, {SETTING: value})
