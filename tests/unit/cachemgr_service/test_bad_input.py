"""Every wrong request is refused with a status, a reason and the field that is wrong, and changes nothing."""

import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cachemgr.process import CacheManagerProcess
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.errors import RemoteError, from_rpc_error
from tests.support.cachemgr_client import SCHEDULED, SCHEDULER, Client, settings_for
from tests.support.patience import patience
from tests.unit.cachemgr_service.bad_admin_requests import ADMIN_METHODS
from tests.unit.cachemgr_service.bad_data_requests import ADMISSION, ANOTHER_SCHEDULER, DATA_METHODS, REGISTRATION, SYNC
from tests.unit.cachemgr_service.bad_requests import CACHED_TOKENS, HOST_BLOCKS, STATUSES, Case, Known

# A method of which nothing can be wrong, and why.
NOTHING_WRONG = {
    "DumpState": "its request has no fields",
}
METHODS = DATA_METHODS | ADMIN_METHODS
SERVICES = pb.DESCRIPTOR.services_by_name
REQUESTS = {method.name: method.input_type for service in SERVICES.values() for method in service.methods}


class Target:
    """A manager in which there is one of everything, at a time that stands still."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[Known, Any] = {}

    async def prepare(self) -> None:
        """Cached blocks, a live sequence, a rule, a quota and a pin."""
        client = self._client
        for scheduler, epoch in ((SCHEDULER, 1), ("twice", 5)):
            request = pb.RegisterSchedulerRequest(scheduler_id=scheduler, scheduler_epoch=epoch)
            answer = await client.manager.RegisterScheduler(request, timeout=patience(5))
        client.manager_epoch = self._known[Known.MANAGER_EPOCH] = answer.manager_epoch
        await client.manager.RegisterExecutor(self.request("RegisterExecutor", REGISTRATION), timeout=patience(5))
        await client.compute(await client.admit("done", CACHED_TOKENS), len(CACHED_TOKENS))
        live = (await client.admit("live", 10)).sequence_handle
        self._known[Known.LIVE_HANDLE] = live
        await client.sync(2, handles=[live], computed_tokens=[8], new_token_counts=[0])
        for method, fields in (
            ("CreateRetentionRule", {"rule": _rule()}),
            ("SetQuota", {"quota": {"tenant_id": "acme", "device_floor_blocks": 2, "host_floor_blocks": 2}}),
        ):
            await self.call(method, fields)
        pin = {"prefix": {"token_ids": CACHED_TOKENS}, "owner": "o", "duration": {"seconds": 60}}
        self._known[Known.HOLD_NAME] = (await self.call("PinPrefix", pin)).hold_name
        assert self._known[Known.HOLD_NAME]

    def request(self, method: str, fields: dict[str, Any]) -> Any:
        """A request of a method, filled with the known values."""
        values = {name: self._put_in(value) for name, value in fields.items()}
        return getattr(pb, REQUESTS[method].name)(**values)

    def _put_in(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._put_in(one) for one in value]
        return self._known[value] if isinstance(value, Known) else value

    async def call(self, method: str, fields: dict[str, Any]) -> Any:
        """The answer, or the first message of it."""
        client = self._client
        stub = next(stub for stub in (client.manager, client.admin, client.events) if hasattr(stub, method))
        call = getattr(stub, method)(self.request(method, fields), timeout=patience(10))
        if inspect.isawaitable(call):
            return await call
        try:
            return await call.read()
        finally:
            call.cancel()

    async def refusal(self, method: str, fields: dict[str, Any]) -> RemoteError | None:
        """The error of a call, None when it succeeds."""
        try:
            await self.call(method, fields)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        return None

    async def state(self) -> str:
        """Hash of all state that decides about later events."""
        messages = [
            message async for message in self._client.admin.DumpState(pb.DumpStateRequest(), timeout=patience(5))
        ]
        return str(messages[-1].state_hash)


def _rule() -> dict[str, Any]:
    action = {"retention_priority": 50, "retention_duration": {"seconds": 60}}
    return {"name": "rule-a", "match": {"prefix_token_ids": [1]}, "action": action}


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    settings = settings_for(tmp_path)
    process = CacheManagerProcess(settings, clock=lambda: 1000.0)
    await process.start()
    client = Client(settings)
    target = Target(client)
    await target.prepare()
    yield target
    await client.close()
    await process.stop()


async def wrong(target: Target, method: str, good: dict[str, Any], case: Case) -> str:
    """What is not as it should be about the answer to a bad request; empty when all is."""
    changes, reason, field = case
    before = await target.state()
    error = await target.refusal(method, good | changes)
    shown = f"{str(changes)[:200]}:"
    if error is None:
        return f"{shown} is accepted"
    if (error.code, error.reason) != (STATUSES[reason], reason):
        return f"{shown} {error.code.name} {error}"
    if list(error.fields) != ([field] if field else []):
        return f"{shown} {field} is right, and {list(error.fields)} named"
    return "" if await target.state() == before else f"{shown} changes something"


@pytest.mark.parametrize("method", METHODS)
async def test_what_is_wrong_is_refused_by_name_and_changes_nothing(target: Target, method: str) -> None:
    good, cases = METHODS[method]
    found = [await wrong(target, method, good, case) for case in cases]
    assert [text for text in found if text] == []
    # Else all of it might be refused for another reason.
    assert await target.refusal(method, good) is None


def test_every_method_has_bad_input_or_a_reason_to_have_none() -> None:
    assert {name for name, (_, cases) in METHODS.items() if cases} | set(NOTHING_WRONG) == set(REQUESTS)
    assert not set(METHODS) & set(NOTHING_WRONG)


def test_every_listing_is_given_a_foreign_token() -> None:
    listings = {name for name, request in REQUESTS.items() if "page_token" in request.fields_by_name}
    assert listings
    for name in listings:
        assert any("page_token" in changes for changes, _, _ in METHODS[name][1]), name


async def test_a_preview_changes_nothing(target: Target) -> None:
    good, _ = METHODS["PreviewAdmission"]
    before = await target.state()
    assert (await target.call("PreviewAdmission", good)).admitted
    assert await target.state() == before


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("TruncateSequence", SCHEDULED | {"sequence_id": "nobody", "num_tokens": 1}),
        ("TruncateSequence", ANOTHER_SCHEDULER | {"sequence_id": "live", "num_tokens": 9}),
    ],
)
async def test_a_sequence_that_the_caller_does_not_have_is_no_error(
    target: Target, method: str, fields: dict[str, Any]
) -> None:
    before = await target.state()
    assert not (await target.call(method, fields)).found
    assert await target.state() == before


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("TruncateSequence", "sequence_id"),
        ("ForkSequence", "parent_sequence_id"),
        ("HoldSequence", "sequence_id"),
    ],
)
async def test_a_sequence_that_lost_its_blocks_is_named(target: Target, method: str, field: str) -> None:
    await target.call("RegisterExecutor", REGISTRATION | {"executor_epoch": REGISTRATION["executor_epoch"] + 1})
    assert await wrong(target, method, METHODS[method][0], ({}, "VOID_SEQUENCE", field)) == ""


async def test_a_truncation_into_a_block_of_others_is_named(target: Target) -> None:
    await target.call("ForkSequence", SCHEDULED | {"parent_sequence_id": "live", "sequence_id": "new"})
    case = SCHEDULED | {"sequence_id": "new", "num_tokens": 2}, "SHARED_BLOCK", "num_tokens"
    assert await wrong(target, "TruncateSequence", {}, case) == ""


async def test_what_has_evicted_tokens_is_named_where_it_cannot_be_used(target: Target) -> None:
    window = {"kind": "EVICTION_KIND_SLIDING_WINDOW", "recent_tokens": 4}
    answered = await target.call("AdmitSequences", {"admissions": [ADMISSION | {"eviction_policy": window}]})
    handle = answered.answers[0].sequence_handle
    progress = {"handles": [handle], "computed_tokens": [10], "new_token_counts": [0], "new_token_ids": []}
    await target.call("SyncSequences", SYNC | progress | {"evicting_handles": [handle]})
    for low in (7, 11):
        moved = {"sync_number": 5, "evicted_handles": [handle], "computed_tokens_before_eviction": [low]}
        case = moved, "INVALID_FIELD", "computed_tokens_before_eviction[0]"
        assert await wrong(target, "SyncSequences", SYNC | progress, case) == ""
    moved = {"sync_number": 5, "evicted_handles": [handle], "computed_tokens_before_eviction": [10]}
    await target.call("SyncSequences", SYNC | progress | moved)
    for method, fields, field in (
        ("ForkSequence", {"parent_sequence_id": "new", "sequence_id": "fork"}, "parent_sequence_id"),
        ("TruncateSequence", {"sequence_id": "new", "num_tokens": 2}, "sequence_id"),
    ):
        assert await wrong(target, method, SCHEDULED | fields, ({}, "SEQUENCE_EVICTS", field)) == ""
    case = moved | {"sync_number": 6}, "INVALID_FIELD", "evicted_handles[0]"
    assert await wrong(target, "SyncSequences", SYNC | progress, case) == ""


async def test_a_rule_that_the_executor_cannot_carry_is_no_fault_of_any_field(target: Target) -> None:
    action = {"eviction_policy": {"kind": "EVICTION_KIND_SUM", "start_tokens": 6}}
    await target.call("CreateRetentionRule", {"rule": {"name": "six", "action": action}})
    assert await wrong(target, "AdmitSequences", {"admissions": [ADMISSION]}, ({}, "RULE_POLICY", "")) == ""


async def test_the_dump_shows_a_change_of_rules_and_quotas_and_no_tokens(target: Target) -> None:
    before = await target.state()
    assert await target.refusal("DeleteRetentionRule", {"name": "rule-a"}) is None
    without_rule = await target.state()
    quota = {"tenant_id": "acme", "host_ceiling_blocks": HOST_BLOCKS}
    assert await target.refusal("SetQuota", {"quota": quota}) is None
    assert len({before, without_rule, await target.state()}) == 3
