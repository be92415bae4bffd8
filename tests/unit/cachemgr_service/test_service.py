"""The cache manager's services, as schedulers, executors and operators meet them."""

import grpc
from google.protobuf.duration_pb2 import Duration

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.cachemgr_client import EXECUTOR, NUM_BLOCKS, Client
from tests.support.patience import patience


async def test_a_full_salt_of_a_tenant_lets_its_other_salts_pass(client: Client) -> None:
    await client.register()
    await client.admin.SetQuota(
        pb.SetQuotaRequest(quota=pb.Quota(salt="t/a", device_ceiling_blocks=4)), timeout=patience(5)
    )
    prompts = {name: [1_000 * number + token for token in range(12)] for number, name in enumerate("abcd")}
    request = pb.AdmitSequencesRequest(
        admissions=[
            client.admission("a", prompts["a"], salt="t/a", tenant_id="t"),
            client.admission("b", prompts["b"], salt="t/a", tenant_id="t"),
            client.admission("c", prompts["c"], salt="t/a", tenant_id="t"),
            client.admission("d", prompts["d"], salt="t/b", tenant_id="t"),
        ]
    )
    answers = (await client.manager.AdmitSequences(request, timeout=patience(5))).answers
    assert [answer.admitted for answer in answers] == [True, False, False, True]
    assert [answer.full_account for answer in answers[1:3]] == [pb.QuotaAccount(salt="t/a")] * 2
    # A tenant's quota precedes that of its salts: then all of them wait.
    tenants = pb.Quota(tenant_id="t", device_ceiling_blocks=4)
    await client.admin.SetQuota(pb.SetQuotaRequest(quota=tenants), timeout=patience(5))
    later = [client.admission(f"{salt}2", prompts["b"], salt=f"t/{salt}", tenant_id="t") for salt in "bc"]
    others = client.admission("e", prompts["b"], salt="t/b", tenant_id="u")
    request = pb.AdmitSequencesRequest(admissions=[*later, others])
    answers = (await client.manager.AdmitSequences(request, timeout=patience(5))).answers
    assert [answer.admitted for answer in answers] == [False, False, True]
    assert answers[1].full_account == pb.QuotaAccount(tenant_id="t")


async def test_several_admissions_end_with_the_first_that_must_wait(client: Client) -> None:
    await client.register()

    async def admit(*lengths: int) -> list[bool]:
        prompts = ([1_000 * number + token for token in range(length)] for number, length in enumerate(lengths))
        admissions = [client.admission(f"{prompt[0]}/{len(prompt)}", prompt) for prompt in prompts]
        request = pb.AdmitSequencesRequest(admissions=admissions)
        return [
            answer.admitted for answer in (await client.manager.AdmitSequences(request, timeout=patience(5))).answers
        ]

    huge = NUM_BLOCKS * 4 - 8
    assert await admit(10, huge, 10) == [True, False]
    # A wrong item is not answered, and does not undo the items before it.
    assert await admit(10, 12, NUM_BLOCKS * 400, 10) == [True, True]
    assert len((await client.admin.ListSequences(pb.ListSequencesRequest(), timeout=patience(5))).sequences) == 2


async def test_a_released_sequence_is_unknown_to_the_next_sync(client: Client) -> None:
    await client.register()
    admitted = await client.admit("a", 10)
    released = await client.sync(1, released_handles=[admitted.sequence_handle])
    assert released.free_blocks == NUM_BLOCKS
    answer = await client.sync(2, handles=[admitted.sequence_handle], computed_tokens=[4], new_token_counts=[0])
    assert list(answer.unknown_handles) == [admitted.sequence_handle]
    assert answer.free_blocks == answer.total_blocks == NUM_BLOCKS


async def test_listings_are_paged(client: Client) -> None:
    await client.register()
    handles = [
        (await client.admit(f"s{number}", [number * 100 + token for token in range(5)])).sequence_handle
        for number in range(5)
    ]
    seen: list[int] = []
    token = ""
    while True:
        page = await client.admin.ListSequences(
            pb.ListSequencesRequest(page_size=2, page_token=token), timeout=patience(5)
        )
        assert len(page.sequences) <= 2
        seen += [sequence.sequence_handle for sequence in page.sequences]
        token = page.next_page_token
        if not token:
            break
    assert seen == sorted(handles)
    pools = await client.admin.ListPools(pb.ListPoolsRequest(), timeout=patience(5))
    assert [pool.pool_id for pool in pools.pools] == [f"{EXECUTOR}/0"]
    assert pools.pools[0].spec.num_blocks == NUM_BLOCKS
    blocks = await client.admin.ListBlocks(
        pb.ListBlocksRequest(pool_id=f"{EXECUTOR}/0", page_size=3), timeout=patience(5)
    )
    assert len(blocks.blocks) == 3
    rest = await client.admin.ListBlocks(
        pb.ListBlocksRequest(pool_id=f"{EXECUTOR}/0", page_token=blocks.next_page_token), timeout=patience(5)
    )
    slots = [block.slot for block in (*blocks.blocks, *rest.blocks)]
    assert slots == sorted(set(slots))
    assert all(block.tier == pb.TIER_DEVICE for block in blocks.blocks)


async def test_a_watch_starts_with_a_snapshot_and_continues_without_a_gap(client: Client) -> None:
    await client.register()
    await client.compute(await client.admit("a", 8), 8)
    watch = client.events.WatchEvents(pb.WatchEventsRequest(), timeout=patience(10))
    shown = await read_events(watch, 4)
    assert all(event.snapshot for event in shown)
    executor, *others = shown
    assert (executor.kind, executor.executor.executor_id) == (pb.EVENT_KIND_EXECUTOR_REGISTERED, EXECUTOR)
    assert [event.kind for event in others] == [pb.EVENT_KIND_CREATED, *[pb.EVENT_KIND_STORED] * 2]
    number = shown[-1].event_number
    await client.admin.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(5))
    removed = await read_events(watch, 2)
    assert [event.event_number for event in removed] == [number + 1, number + 2]
    assert {event.kind for event in removed} == {pb.EVENT_KIND_REMOVED}
    assert {event.removal_cause for event in removed} == {pb.REMOVAL_CAUSE_PURGED}
    watch.cancel()
    resumed = client.events.WatchEvents(pb.WatchEventsRequest(after_event_number=number), timeout=patience(10))
    assert await read_events(resumed, 2) == removed
    resumed.cancel()


async def test_leases_are_events_for_watchers(client: Client) -> None:
    await client.register()
    kept = common.RetentionRange(retention_priority=80, retention_duration=Duration(seconds=3600))
    admission = await client.admit("a", 8, session_id="chat", retention=pb.RetentionConfig(ranges=[kept]))
    await client.compute(admission, 8)
    watch = client.events.WatchEvents(pb.WatchEventsRequest(), timeout=patience(10))
    shown = await read_events(watch, 6)
    assert all(event.snapshot for event in shown)
    event = next(event for event in shown if event.kind == pb.EVENT_KIND_LEASE_GRANTED)
    assert (event.lease.holder, event.lease.retention_priority) == ("session/chat", 80)
    assert 3600 - patience(60) < event.lease.remaining_duration.seconds <= 3600
    assert event.block.retention_priority == 80
    watch.cancel()


async def read_events(watch: grpc.aio.UnaryStreamCall, at_least: int) -> list[pb.Event]:
    found: list[pb.Event] = []
    while len(found) < at_least:
        found += (await anext(aiter(watch))).events
    return found
