"""What tables say about messages."""

import pytest

from kvctl.display.output import names, plain, table
from kvctl.display.tables import BLOCKS, HOLDS, POOLS, explanations, previews
from protos.kvcache.v1 import kvcache_pb2 as pb


def cells(pool: pb.Pool) -> dict[str, str]:
    """The cells of a pool, whose texts have single spaces only, by their headers."""
    head, row = table(POOLS, [pool], wide=False).splitlines()
    names = head.split()
    return dict(zip(names, [cell.strip() for cell in row.split("   ") if cell.strip()], strict=True))


def test_each_block_of_a_pool_counts_once() -> None:
    pool = pb.Pool(pool_id="e/0", total_blocks=512, used_blocks=3, cached_blocks=171, free_blocks=509)
    found = cells(pool)
    assert (found["USED"], found["CACHED"], found["EMPTY"]) == ("3", "171", "338")
    owing = pb.Pool(pool_id="e/0", total_blocks=2, used_blocks=6)
    assert cells(owing)["EMPTY"] == "0"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "0/91"),
        ({"used_blocks": 2, "cached_blocks": 5}, "7/91"),
        ({"copy_blocks": 91}, "91/91 (91 copies)"),
        ({"cached_blocks": 5, "copy_blocks": 1}, "6/91 (1 copy)"),
    ],
)
def test_copies_of_device_blocks_fill_a_lower_tier(counts: dict[str, int], said: str) -> None:
    host = pb.TierUsage(tier=pb.TIER_HOST, total_blocks=91, **counts)
    found = cells(pb.Pool(pool_id="e/0", lower_tiers=[host]))
    assert (found["HOST"], found["DISK"]) == (said, "-")


def test_a_key_in_json_begins_with_what_tables_show() -> None:
    block = pb.Block(pool_id="e/0", key=bytes(range(32)))
    answer = pb.ExplainPrefixResponse(explanations=[pb.Explanation(blocks=[pb.ExplainedBlock(block=block)])])
    [found] = plain(answer)["explanations"][0]["blocks"]
    assert found["block"]["key"] == bytes(range(32)).hex()
    assert found["block"]["parent_key"] == ""
    head, row = table(BLOCKS, [block], wide=False).splitlines()
    assert found["block"]["key"].startswith(row.split()[head.split().index("KEY")])


def test_names_are_those_that_other_verbs_take() -> None:
    assert names(POOLS, [pb.Pool(pool_id="e/0"), pb.Pool(pool_id="e/1"), pb.Pool(pool_id="e/0")]) == "e/0\ne/1"
    assert names(HOLDS, [pb.Hold(name="pin-1", owner="ops")]) == "pin-1"
    assert names(BLOCKS, [pb.Block(pool_id="e/0", key=bytes(32))]) == "00" * 32


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (
            pb.Explanation(cached_tokens=1, miss_reason=pb.MISS_REASON_OTHER_SALT),
            "e: 1 cached token\nthe next block is",
        ),
        (pb.Explanation(), "e: 0 cached tokens\nthe prompt is shorter than a block"),
    ],
)
def test_an_explanation_has_a_reason(one: pb.Explanation, said: str) -> None:
    one.executor_id = "e"
    assert explanations(pb.ExplainPrefixResponse(explanations=[one]), wide=False).startswith(said)


def test_a_preview_says_whether_a_request_would_wait_and_for_what() -> None:
    estimate = pb.BlockEstimate(group=0, reusable_blocks=2, next_step_blocks=1, completion_blocks=7)
    waits = pb.PreviewAdmissionResponse(missing_blocks=1, cached_tokens=32, estimates=[estimate])
    found = previews({"e": pb.PreviewAdmissionResponse(admitted=True, cached_tokens=1), "f": waits}, 40, wide=False)
    admitted, waiting = found.split("\n\n")
    assert admitted.startswith("e: would be admitted, 1 of 40 tokens cached\n")
    head, columns, row = waiting.splitlines()
    assert head == "f: would wait: 1 block missing, 32 of 40 tokens cached"
    assert dict(zip(columns.split(), row.split(), strict=True)) == {
        "GROUP": "0",
        "CACHED": "2",
        "ALLOCATED": "1",
        "TO-THE-END": "7",
    }
