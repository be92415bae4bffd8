"""What engines were just given counts as cached until events report it."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.router.notes import NOTE_SECONDS, Notes


def test_a_note_counts_until_its_time_is_over_and_without_a_first_token_for_ever() -> None:
    notes = Notes()
    note = notes.add("a", [1, 2, 3])
    assert note is not None
    assert notes.match("a", [1, 2, 9], now=1e9) == 2
    notes.computed(note, now=1e9)
    assert notes.match("a", [1, 2, 3, 4], now=1e9 + NOTE_SECONDS - 0.1) == 3
    assert notes.match("b", [1, 2, 3], now=1e9) == 0
    assert notes.match("a", [1, 2, 3], now=1e9 + NOTE_SECONDS) == 0


def test_notes_of_prompts_that_never_come_again_are_forgotten() -> None:
    notes = Notes()
    for key in range(1, 100):
        note = notes.add("a", [key])
        assert note is not None
        notes.computed(note, now=float(key))
    assert notes.match("a", [1], now=100.0) == 0
    assert [note.keys for kept in notes._notes.values() for note in kept] == [[99]]


def test_a_note_that_is_removed_counts_no_more_and_others_do() -> None:
    notes = Notes()
    one, other = notes.add("a", [1, 2, 3]), notes.add("a", [1, 2])
    assert one is not None
    assert other is not None
    notes.remove(one)
    assert notes.match("a", [1, 2, 3], now=0.0) == 2
    notes.remove(other)
    notes.remove(other)
    assert notes.match("a", [1, 2, 3], now=0.0) == 0


def test_a_prompt_without_a_full_block_is_not_noted() -> None:
    assert Notes().add("a", []) is None
    assert Notes().match("a", [], now=0.0) == 0


# Keys are a chain: two prompts that differ somewhere differ in every later key.
_paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=12)


def _chain(path: list[int]) -> list[int]:
    return [hash(tuple(path[: end + 1])) for end in range(len(path))]


@given(_paths, st.lists(st.integers(0, 1), max_size=7))
def test_a_match_is_the_longest_common_prefix_with_any_note(paths: list[list[int]], asked: list[int]) -> None:
    notes = Notes()
    for path in paths:
        notes.add("a", _chain(path))
    keys = _chain(asked)
    expected = max(sum(1 for key in keys if key in _chain(path)) for path in paths)
    assert notes.match("a", keys, now=0.0) == expected
