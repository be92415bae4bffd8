"""Pages of a listing whose items come and go between two pages: every item that stays is there once."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.managers import Managers, cached, pin


@pytest.fixture
def managers(tmp_path: Path) -> Managers:
    return Managers(tmp_path, "")


Read = Callable[[str], Awaitable[tuple[list[str], str]]]
Change = Callable[[], Awaitable[object]]


async def names_of_pages(read: Read, changes: list[Change]) -> list[str]:
    """Names over all pages; after each page the next change is made."""
    names, token = await read("")
    for change in changes:
        await change()
        more, token = await read(token)
        names += more
    assert not token
    return names


async def test_rules_that_go_between_pages_hide_no_other(managers: Managers) -> None:
    async with managers.run() as client:
        for name in "abcdef":
            rule = pb.RetentionRule(name=name, action=pb.RuleAction(retention_priority=60))
            await client.admin.CreateRetentionRule(pb.CreateRetentionRuleRequest(rule=rule))

        async def read(token: str) -> tuple[list[str], str]:
            page = await client.admin.ListRetentionRules(pb.ListRetentionRulesRequest(page_size=2, page_token=token))
            return [rule.name for rule in page.rules], page.next_page_token

        # The token points at the second item.
        def delete(name: str) -> Change:
            return lambda: client.admin.DeleteRetentionRule(pb.DeleteRetentionRuleRequest(name=name))

        assert await names_of_pages(read, [delete("b"), delete("a")]) == list("abcdef")


async def test_quotas_that_come_and_go_between_pages_hide_and_repeat_no_other(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        for name in "bcdefg":
            await client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt=name, device_ceiling_blocks=5)))

        async def read(token: str) -> tuple[list[str], str]:
            page = await client.admin.ListQuotas(pb.ListQuotasRequest(page_size=2, page_token=token))
            return [usage.quota.salt for usage in page.quotas], page.next_page_token

        changes: list[Change] = [
            lambda: client.admin.SetQuota(pb.SetQuotaRequest(quota=pb.Quota(salt="a", device_ceiling_blocks=5))),
            lambda: client.admin.DeleteQuota(pb.DeleteQuotaRequest(salt="b")),
        ]
        assert await names_of_pages(read, changes) == list("bcdefg")


async def test_pins_that_end_between_pages_hide_no_other(managers: Managers) -> None:
    async with managers.run() as client:
        await client.register()
        await cached(client, 9)
        pinned = [await pin(client, pb.PrefixSelector(token_ids=range(4)), f"ops-{number}", 100) for number in range(6)]
        assert all(one.receipt.outcome == common.OUTCOME_GRANTED for one in pinned)
        names = [one.hold_name for one in pinned]

        async def read(token: str) -> tuple[list[str], str]:
            page = await client.admin.ListHolds(pb.ListHoldsRequest(page_size=2, page_token=token))
            return [hold.name for hold in page.holds], page.next_page_token

        def end(name: str) -> Change:
            return lambda: client.admin.ReleaseHold(pb.ReleaseHoldRequest(name=name))

        assert await names_of_pages(read, [end(names[1]), end(names[0])]) == names
