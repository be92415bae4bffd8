"""Pages cover a listing exactly once, and only their own tokens continue them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.rpc.paging import cut, decode_number, decode_token, encode_token, page_limit
from protos.rpc.errors import InvalidField


def test_a_page_size_is_bounded() -> None:
    assert [page_limit(size) for size in (0, 1, 1000, 1001, 2**31 - 1)] == [50, 1, 1000, 1000, 1000]
    with pytest.raises(InvalidField) as caught:
        page_limit(-1)
    assert list(caught.value.fields) == ["page_size"]


@given(st.lists(st.integers(1, 10**9), unique=True, max_size=30).map(sorted), st.integers(1, 7))
def test_pages_give_every_item_once(numbers: list[int], size: int) -> None:
    seen: list[int] = []
    token = ""
    while True:
        after = decode_number("numbers", token)
        page, token = cut((number for number in numbers if number > after), size, "numbers", lambda number: number)
        assert len(page) <= size
        seen += page
        if not token:
            break
    assert seen == numbers


@given(st.text(min_size=1))
def test_a_cursor_survives_its_token(cursor: str) -> None:
    assert decode_token("pools", encode_token("pools", cursor)) == cursor


@pytest.mark.parametrize("token", ["x", "====", "ü", encode_token("pools", "1"), encode_token("blocks", "one"), "YWJj"])
def test_a_foreign_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidField) as caught:
        decode_number("blocks", token)
    assert list(caught.value.fields) == ["page_token"]
