"""Effects of policies on lengths, and errors in policies, with the field's name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.kvcommon.eviction import AFTER_PREFILL, AREAS, Kind, Layout, Policy, parse
from protos.kvcommon.eviction_message import message_of
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField

PLAIN = Layout(block_size=16, windows=(None,), plain_rotary=True)
KINDS = [kind for kind in Kind if kind is not Kind.NONE]


def policy(kind: Kind, layout: Layout = PLAIN, **fields: Any) -> Policy:
    parsed = parse(common.EvictionPolicy(kind=kind.value, **fields), layout)
    assert parsed is not None
    return parsed


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_defaults_that_survive_a_message(kind: Kind) -> None:
    parsed = policy(kind)
    again = parse(message_of(parsed), PLAIN)
    assert again is not None
    assert again.mass == pytest.approx(parsed.mass)
    assert (again.kind, again.start, again.recent, again.maximum, again.period, again.score_window) == (
        (parsed.kind, parsed.start, parsed.recent, parsed.maximum, parsed.period, parsed.score_window)
    )


def test_a_window_passes_a_prompt_in_larger_pieces_than_tokens() -> None:
    assert policy(Kind.SLIDING_WINDOW).period == 1
    assert policy(Kind.SLIDING_WINDOW, during_prefill=True).period == 64
    assert policy(Kind.SLIDING_WINDOW, during_prefill=True, period_tokens=3).period == 3


def test_a_window_turns_compacted_keys_in_larger_pieces_than_tokens() -> None:
    compacted = {"positions": "EVICTION_POSITIONS_COMPACTED"}
    assert policy(Kind.SLIDING_WINDOW, **compacted).period == 64
    assert policy(Kind.SLIDING_WINDOW, **compacted, period_tokens=1).period == 1


def test_none_keeps_everything() -> None:
    assert parse(common.EvictionPolicy(kind="EVICTION_KIND_NONE"), PLAIN) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "kind"),
        ({"kind": 99}, "kind"),
        ({"kind": "EVICTION_KIND_SUM", "start_tokens": 0}, "start_tokens"),
        ({"kind": "EVICTION_KIND_SUM", "recent_tokens": 13}, "recent_tokens"),
        ({"kind": "EVICTION_KIND_NORM_SUM", "max_cache_tokens": 100}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_NORM_SUM", "max_cache_tokens": 160}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_NORM_SUM", "period_tokens": 16}, "period_tokens"),
        ({"kind": "EVICTION_KIND_NORM_SUM", "during_prefill": True}, "during_prefill"),
        ({"kind": "EVICTION_KIND_SUM", "start_tokens": 1 << 25}, "start_tokens"),
        ({"kind": "EVICTION_KIND_SLIDING_WINDOW", "recent_tokens": 0}, "recent_tokens"),
        ({"kind": "EVICTION_KIND_SLIDING_WINDOW", "recent_tokens": 8, "max_cache_tokens": 9}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_SLIDING_WINDOW", "period_tokens": 0}, "period_tokens"),
        ({"kind": "EVICTION_KIND_SLIDING_WINDOW", "score_window_tokens": 8}, "score_window_tokens"),
        ({"kind": "EVICTION_KIND_AVERAGE", "max_cache_tokens": 64}, "period_tokens"),
        ({"kind": "EVICTION_KIND_AVERAGE", "period_tokens": 0}, "period_tokens"),
        ({"kind": "EVICTION_KIND_KEYDIFF", "max_cache_tokens": 48}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "period_tokens": 0}, "period_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "period_tokens": 24}, "period_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "recent_tokens": 0}, "recent_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "recent_tokens": 100}, "recent_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "max_cache_tokens": 144}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "max_cache_tokens": 200}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "attention_mass": 0.0}, "attention_mass"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "attention_mass": 1.5}, "attention_mass"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_WINDOW", "during_prefill": True}, "during_prefill"),
        ({"kind": "EVICTION_KIND_SLIDING_WINDOW", "attention_mass": 0.9}, "attention_mass"),
        ({"kind": "EVICTION_KIND_LAST", "recent_tokens": 2}, "kind"),
        ({"kind": "EVICTION_KIND_LAST", "max_cache_tokens": 1}, "max_cache_tokens"),
        ({"kind": "EVICTION_KIND_LAST", "during_prefill": True}, "during_prefill"),
        ({"kind": "EVICTION_KIND_H2O_TOVA", "during_prefill": True}, "during_prefill"),
        ({"kind": "EVICTION_KIND_SNAPKV", "score_window_tokens": 0}, "score_window_tokens"),
        ({"kind": "EVICTION_KIND_SUM", "positions": 7}, "positions"),
        ({"kind": "EVICTION_KIND_ADAPTIVE_RKV", "kvcrush": common.KvCrush(budget_blocks=1)}, "kvcrush"),
        ({"kind": "EVICTION_KIND_SUM", "kvcrush": common.KvCrush()}, "kvcrush.budget_blocks"),
        ({"kind": "EVICTION_KIND_SUM", "kvcrush": common.KvCrush(budget_blocks=1, anchor=9)}, "kvcrush.anchor"),
        ({"kind": "EVICTION_KIND_SUM", "adaptive_rkv": common.AdaptiveRkv()}, "adaptive_rkv"),
        (
            {"kind": "EVICTION_KIND_ADAPTIVE_RKV", "adaptive_rkv": common.AdaptiveRkv(attention_mass=float("nan"))},
            "adaptive_rkv.attention_mass",
        ),
        (
            {"kind": "EVICTION_KIND_ADAPTIVE_RKV", "adaptive_rkv": common.AdaptiveRkv(window_steps=0)},
            "adaptive_rkv.window_steps",
        ),
    ],
)
def test_bad_policies_are_refused_with_the_fields_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(common.EvictionPolicy(**fields), PLAIN, "here")
    assert list(caught.value.fields) == [f"here.{field}"]


@pytest.mark.parametrize("windows", [(512,), (None, 512), (None, None)])
def test_windows_of_the_model_are_not_mixed_with_eviction(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(InvalidField, match="kind"):
        policy(Kind.SUM, Layout(16, windows, True))


def test_positions_are_compacted_with_plain_rotary_embeddings_only() -> None:
    assert policy(Kind.SUM, positions="EVICTION_POSITIONS_COMPACTED").compacted
    with pytest.raises(InvalidField, match="positions"):
        policy(Kind.SUM, Layout(16, (None,), False), positions="EVICTION_POSITIONS_COMPACTED")


def run(chosen: Policy, prompt: int, output: int) -> list[int]:
    """Slots in use after each step: the prompt in chunks of at most 64, then token by token."""
    kept, computed, used = 0, 0, []
    while computed < prompt + output:
        kept = chosen.kept_after(kept, computed, prompt)
        room = chosen.room(kept, computed, prompt)
        count = min(64, max(1, prompt - computed)) if room is None else min(64, room, max(1, prompt - computed))
        assert count >= 1
        kept, computed = kept + count, computed + count
        used.append(kept)
    return used


@given(
    kind=st.sampled_from(KINDS),
    prompt=st.integers(1, 700),
    output=st.integers(1, 300),
    during_prefill=st.booleans(),
    crush=st.integers(0, 3),
)
def test_a_sequence_never_uses_more_slots_than_its_policy_says(
    kind: Kind, prompt: int, output: int, during_prefill: bool, crush: int
) -> None:
    fields: dict[str, Any] = {"recent_tokens": 48} if kind is not Kind.LAST else {}
    if kind is not Kind.SLIDING_WINDOW:
        fields["max_cache_tokens"] = 128
    if kind in AREAS:
        fields["start_tokens"] = 16
    if crush and kind in (Kind.SUM, Kind.NORM_SUM):
        fields["kvcrush"] = common.KvCrush(budget_blocks=crush)
    if during_prefill and kind not in AFTER_PREFILL:
        fields["during_prefill"] = True
    chosen = policy(kind, **fields)
    used = run(chosen, prompt, output)
    assert max(used) <= max(prompt, chosen.most_kept or prompt + output)
    if chosen.during_prefill:
        assert max(used) <= (chosen.most_kept or 0)
    if chosen.most_kept is not None:
        assert used[-1] <= max(chosen.most_kept, prompt)
        assert output < 2 or used[-1] <= chosen.most_kept
    assert chosen.reusable(prompt, prompt) <= min(prompt, chosen.clean_tokens(prompt, prompt))


def test_the_last_query_of_a_prompt_has_a_step_of_its_own_where_it_counts_by_itself() -> None:
    chosen = policy(Kind.H2O_TOVA, max_cache_tokens=128)
    assert [chosen.room(computed, computed, 300) for computed in (0, 298, 299)] == [299, 1, 1]
    assert chosen.room(1, 0, 1) == 1
    assert policy(Kind.H2O, max_cache_tokens=128).room(0, 0, 300) == 300


def test_an_adaptive_window_is_admitted_with_its_least_length() -> None:
    chosen = policy(Kind.ADAPTIVE_WINDOW, start_tokens=4, recent_tokens=32, max_cache_tokens=100)
    assert (chosen.window, chosen.most_kept) == (32, 4 + 32 + 16)
    longer = chosen.with_window(96)
    assert (longer.window, longer.most_kept, longer.bounds) == (96, 4 + 96 + 16, chosen.bounds)
    assert [tokens for tokens in range(120) if chosen.allows_window(tokens)] == [32, 48, 64, 80, 96]
    assert not policy(Kind.SLIDING_WINDOW).allows_window(512)
    again = parse(message_of(longer), PLAIN)
    assert again is not None
    assert (again.bounds, again.window) == (chosen.bounds, chosen.window)


def test_an_adaptive_window_looks_half_a_period_before_it_evicts_and_behind_a_long_prompt() -> None:
    chosen = policy(Kind.ADAPTIVE_WINDOW, start_tokens=4, recent_tokens=32, max_cache_tokens=100)
    assert [kept for kept in range(100) if chosen.looks(kept, kept, 10)] == [44]
    assert [kept for kept in range(100) if chosen.looks(kept, kept, 60)] == [60]
    assert [kept for kept in range(100) if chosen.looks(kept, 500 + kept, 60)] == [44]


def test_areas_keep_between_the_maximum_and_a_block_more() -> None:
    chosen = policy(Kind.NORM_SUM, start_tokens=32, recent_tokens=32, max_cache_tokens=192)
    assert [chosen.kept_after(kept, 500, 100) for kept in (192, 207, 208, 209, 400)] == [192, 207, 192, 193, 192]
    crushing = policy(
        Kind.SUM, start_tokens=32, recent_tokens=32, max_cache_tokens=192, kvcrush=common.KvCrush(budget_blocks=2)
    )
    assert crushing.kept_after(239, 500, 100) == 239
    assert crushing.kept_after(240, 500, 100) == 224


def test_a_window_is_trimmed_behind_the_step_that_saw_one_more() -> None:
    chosen = policy(Kind.SLIDING_WINDOW, recent_tokens=20)
    assert run(chosen, 8, 30)[-3:] == [21, 21, 21]
    assert run(chosen, 100, 3) == [64, 100, 21, 21, 21]


def test_eviction_in_a_prompt_swings_between_the_budget_and_a_period_less() -> None:
    chosen = policy(Kind.AVERAGE, max_cache_tokens=128, during_prefill=True)
    assert run(chosen, 300, 2) == [64, 128, 128, 128, 108, 109, 110]
    assert policy(Kind.AVERAGE, max_cache_tokens=128).first_eviction(300) == 300
    assert policy(Kind.AVERAGE, max_cache_tokens=128).first_eviction(100) == 128


def test_the_last_token_alone_is_kept() -> None:
    assert run(policy(Kind.LAST, max_cache_tokens=2), 40, 4) == [40, 2, 2, 2, 2]
    assert run(policy(Kind.LAST, max_cache_tokens=65), 40, 4) == [40, 2, 3, 4, 5]


def test_what_is_scored_in_the_prompt_is_not_taken_from_the_cache() -> None:
    assert policy(Kind.NORM_SUM).reusable(1000, 1000) == 992
    assert policy(Kind.NORM_SUM, score_window_tokens=0).reusable(1000, 1000) == 0
    assert policy(Kind.TOVA).reusable(1000, 1000) == 999
    assert policy(Kind.AVERAGE).reusable(1000, 1000) == 0
    assert policy(Kind.KNORM).reusable(1000, 1000) == 999
    assert policy(Kind.KNORM, max_cache_tokens=256, during_prefill=True).reusable(1000, 1000) == 255
