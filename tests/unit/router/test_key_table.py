"""The table of keys: against a dictionary, with keys that collide, wrap around its end and make it grow."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler.router import key_table
from scheduler.router.key_table import KeyTable

END = 1 << 64
# Few slots are where these begin: at the end of any table, at its beginning, and in one place between.
KEYS = [*range(END - 12, END), *range(1, 12), *range(END // 3, END // 3 + 12)]


class To(dict[int, int]):
    """Each number becomes the same one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, before: int) -> int:
        return self._number


def found(table: KeyTable, keys: list[int]) -> dict[int, int]:
    numbers = table.get(np.array(keys, np.uint64)).tolist()
    return {key: number for key, number in zip(keys, numbers, strict=True) if number}


def only_changed(after: dict[int, int], numbers: list[int]) -> dict[int, int]:
    return {number: after[number] for number in numbers if after[number] != number}


def spread(numbers: Iterable[int]) -> list[int]:
    """Keys as even as hashes."""
    return [number * 0x9E3779B97F4A7C15 % END for number in numbers]


_operations = st.one_of(
    st.tuples(st.just("change"), st.lists(st.sampled_from(KEYS)), st.integers(0, 4)),
    st.tuples(st.just("others"), st.integers(1, 3)),
    st.tuples(st.just("change all"), st.permutations(range(5)).filter(lambda to: to[0] == 0)),
)


@given(st.lists(_operations, max_size=15))
def test_the_table_is_a_dictionary(operations: list[tuple[Any, ...]]) -> None:
    table, model = KeyTable(), dict[int, int]()
    random = np.random.default_rng(1)
    for kind, *rest in operations:
        if kind == "change all":
            after = dict(enumerate(rest[0]))
            expected = Counter(number for number in model.values() if after[number] != number)
            changed = sum((one for _, one in table.change_all(partial(only_changed, after))), Counter())
            assert changed == expected
            model = {key: after[number] for key, number in model.items()}
            continue
        # Others make a new table now and then.
        keys, number = rest if kind == "change" else (random.integers(1, END, 300, np.uint64).tolist(), rest[0])
        before = Counter(model.get(key, 0) for key in set(keys) if model.get(key, 0) != number)
        assert table.change(keys, To(number)) == before
        model |= dict.fromkeys(keys, number)
        model = {key: one for key, one in model.items() if one}
        # Also while entries move.
        assert found(table, KEYS) == {key: model[key] for key in KEYS if key in model}
    assert found(table, [*KEYS, *set(model).difference(KEYS)]) == model


def test_entries_that_are_gone_leave_room() -> None:
    table = KeyTable()
    for first in range(1, 100_001, 1000):
        keys = spread(range(first, first + 1000))
        table.change(keys, To(1))
        table.change(keys, To(0))
    assert table.size <= 1 << 13
    assert found(table, spread([1])) == {}


def test_entries_that_come_while_all_change_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(key_table, "_SLICE", 100)
    table = KeyTable()
    keys = spread(range(1, 10_001))
    table.change(keys[:500], To(1))
    changed, expected = Counter[int](), dict.fromkeys(keys[:500], 2)
    steps = table.change_all(partial(only_changed, {0: 0, 1: 2, 2: 2, 3: 3}))
    for number, (_, one) in enumerate(steps):
        changed += one
        if number < 95:
            # The table is rebuilt several times.
            new = keys[500 + number * 100 : 600 + number * 100]
            table.change(new, To(3))
            expected |= dict.fromkeys(new, 3)
    assert changed == {1: 500}
    assert found(table, keys) == expected
