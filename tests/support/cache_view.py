"""The contents of a router's view of the caches, read from its table and its masks."""

from collections import Counter

from scheduler.router.view import _LANE, _WIDTH, CacheView, Owner


def entries(view: CacheView) -> list[tuple[int, int]]:
    """Each key in the table, with the number of its mask."""
    table = view._table
    while table._old is not None:
        table._move(1000)
    keys, numbers = table._slots.between(0, table.size)
    return list(zip(keys.tolist(), numbers.tolist(), strict=True))


def assert_nothing_leaks(view: CacheView) -> None:
    """Every lane belongs to an executor or is free, and every mask belongs to some block."""
    used = [executor.lane for executor in view.executors.values()]
    assert sorted([*used, *view._free_lanes]) == list(range(0, view._num_lanes * _WIDTH, _WIDTH))
    assert not view._dropped
    numbers = Counter(number for _, number in entries(view))
    assert len(view) == numbers.total()
    masks = view._masks
    assert {number: masks._blocks[number] for number in masks._numbers.values() if number} == numbers
    assert {masks[number]: number for number in masks._numbers.values()} == masks._numbers
    assert sorted([*masks._free, *masks._numbers.values()]) == list(range(len(masks._masks)))
    assert all(mask < 1 << view._num_lanes * _WIDTH for mask in masks._numbers)


def known(view: CacheView) -> dict[Owner, dict[int, int]]:
    """The tier of each key, as the view has it."""
    found = {owner: dict[int, int]() for owner in view.executors}
    for key, number in entries(view):
        for owner, executor in view.executors.items():
            if tier := view._masks[number] >> executor.lane & _LANE:
                found[owner][key] = tier
    return found
