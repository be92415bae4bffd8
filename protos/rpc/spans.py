"""Spans, each a service's part in a request, and contexts, by which callers name the request."""

import re
from collections.abc import Mapping, Sequence

# Version, trace, span and flags. Later versions may append more, and no version is called ff.
_CONTEXT = re.compile(r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Attribute = str | bool | int | float | Sequence[str]


class Context:
    """A parsed traceparent: the trace and the caller's span. Raises ValueError if the text is no W3C trace context."""

    def __init__(self, traceparent: str) -> None:
        found = _CONTEXT.fullmatch(traceparent)
        if found is None or (found[1] == "00" and found[5]):
            raise ValueError("is no W3C trace context")
        self.trace_id = found[2]
        self.span_id = found[3]
        self.flags = int(found[4], 16)


class Span:
    """A service's part in a request, from the span's creation to its end; this class sends it nowhere."""

    traceparent = ""

    def end(self, attributes: Mapping[str, Attribute], *, error: str = "") -> None:
        """Ends the span; never blocks. error: for programs; empty on success."""
