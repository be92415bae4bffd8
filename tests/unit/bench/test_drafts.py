"""The benchmark of drafts fails if outputs differ more than rounding explains."""

import pytest

from bench.drafts import is_wrong


@pytest.mark.parametrize(
    ("dtype", "different", "wrong"),
    [
        ("float32", 0, False),
        ("float32", 1, True),
        ("bfloat16", 0, False),
        ("bfloat16", 5, False),
        ("bfloat16", 6, True),
    ],
)
def test_in_float32_no_output_may_differ(dtype: str, different: int, wrong: bool) -> None:
    assert is_wrong({"dtype": dtype, "different_outputs": different, "outputs": 6}) is wrong
