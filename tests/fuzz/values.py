"""Values of single fields: usual values, and values at the edges of a type or a check."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
FLOATING = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
NUMBERS = (*_INTEGERS, *FLOATING)
_EDGES = (
    *(0, 1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 100, 101, 127, 128, 255, 256, 257, 999, 1000, 1001, 4096, 49_151, 49_152),
    *((1 << power) + off for power in (16, 24, 31, 32, 53, 63, 64) for off in (-1, 0, 1)),
    *(-1, -2, -(1 << 31), -(1 << 53), -(1 << 63)),
)
_USUAL = (0, 1, 1, 1, 2, 2, 3, 4, 5, 8, 10, 16, 32, 48, 64, 100)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 0.999999, 1.0000001, 2.0, -2.0, 2.1, 100.0, 101.0, 1e-9, 1e-45, 3.4e38, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
_USUAL_FLOATS = (0.0, 0.1, 0.5, 0.7, 0.9, 1.0, 1.0, 2.0)
# Texts with a special meaning somewhere, which get past checks to the code behind them.
_WORDS = (
    *("Retain", "Pin", "Demote", "Prefetch", "Share", "0.1", "priority", "duration_seconds", "owner", "tier", "host"),
    *("system", "user", "assistant", "total_blocks", "order", "match", "action", "action.retention_priority"),
    *("match.salt", "action.eviction_policy", "float32", "executor-0", "executor-0/0"),
)
_USUAL_TEXTS = ("a", "b", "acme", "globex", "session-1", "rule-1", "ops", "Hello", "Once upon a time", "1")
_ODD_TEXTS = (
    *("", " ", "\0", "a\nb", "\t", "é", "日本語", "🜁🜂", "\u202eabc", "\ufeff", "\U0010ffff", "\ue000", "%s%n{}"),
    *("x" * 64, "x" * 65, "x" * 128, "x" * 129, "x" * 256, "x" * 257, "ß" * 128, "ß" * 129, "y" * 1024, "y" * 1025),
    *("'\"`;--", "<script>", "NaN", "-1", "1e999", "\r\n\r\n", "a/b/c", "executor-0/1", "executor-0/", "/0", "\x7f"),
    "../../etc",
)
_LONG = 20_000


def integer(rng: random.Random, cpp_type: int, *, usual: bool) -> int:
    """A number that the type holds."""
    low, high = _INTEGERS[cpp_type]
    if usual:
        return rng.choice(_USUAL) if rng.random() < 0.8 else rng.randrange(1000)
    if rng.random() < 0.2:
        return rng.randint(low, high)
    return min(max(rng.choice(_EDGES), low), high)


def bound(rng: random.Random, field: FieldDescriptor) -> Any:
    """A value at the bounds of a number's type, or beside one of a smaller type."""
    if field.cpp_type in FLOATING:
        return rng.choice(FLOATS)
    low, high = _INTEGERS[field.cpp_type]
    return min(max(rng.choice((low, low + 1, high - 1, high, *_EDGES[-27:])), low), high)


def text(rng: random.Random, *, usual: bool) -> str:
    """A text that UTF-8 has a form for."""
    if usual:
        return rng.choice(_WORDS if rng.random() < 0.6 else _USUAL_TEXTS)
    if rng.random() < 0.1:
        return "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(20))
    if rng.random() < 0.05:
        return rng.choice(("a", "a b ", "日本", "{{}}", "\0")) * rng.randrange(_LONG)
    return rng.choice(_ODD_TEXTS)


def scalar(rng: random.Random, field: FieldDescriptor, *, usual: bool) -> Any:
    """A value of any field but a message; of an enum also one without a name."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.enum_type is not None:
        known = [value.number for value in field.enum_type.values]
        return rng.choice(known if usual else [*known, -1, 99, len(known), (1 << 31) - 1, -(1 << 31)])
    if field.cpp_type in FLOATING:
        return rng.choice(_USUAL_FLOATS if usual else FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((1, 8, 32) if usual else (0, 1, 31, 32, 33, 64, 65, 4096)))
    if field.type == FieldDescriptor.TYPE_STRING:
        return text(rng, usual=usual)
    return integer(rng, field.cpp_type, usual=usual)


def seconds(rng: random.Random, *, usual: bool) -> tuple[int, int]:
    """Seconds and nanoseconds of a duration, which need not be one."""
    if usual:
        return rng.choice(((1, 0), (2, 500_000_000), (5, 0), (60, 0), (0, 50_000_000), (3600, 0)))
    edges = (0, 1, -1, 315_576_000_000, 315_576_000_001, -315_576_000_000, (1 << 63) - 1, -(1 << 63), 1 << 40)
    nanos = (0, 1, -1, 999_999_999, 1_000_000_000, -999_999_999, (1 << 31) - 1, -(1 << 31))
    return rng.choice(edges), rng.choice(nanos)
