"""Requests over HTTP that no description covers: broken bodies and framing, on connections that are kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.report import Report

PATIENCE = 60.0
TELL_SECONDS = 5.0
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
OTHER_PATHS = (
    "/",
    "/v1",
    "/v1/models/",
    "/v1/models/%ff%00",
    "/v1/models/" + "a/" * 2000,
    "/metrics?x=%zz",
    "/v1/../x",
    "*",
    "//",
    "/é",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PROPFIND")
# More than the server takes of a body.
HUGE = 13 << 20

VALID: dict[str, dict[str, Any]] = {
    PATHS[0]: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    PATHS[1]: {"prompt": [1000, 1001, 1002], "max_tokens": 1},
    PATHS[2]: {"prompt": "Hello"},
    PATHS[3]: {"tokens": [1000, 1001]},
}


@dataclass(frozen=True)
class Sent:
    """One request. closes: whether nothing can follow it on its connection. whole: whether an answer is due."""

    kind: str
    data: bytes
    whole: bool = True
    closes: bool = False


def fuzz(address: str, report: Report, count: int, tell: Callable[[str], None]) -> None:
    """So many requests, several per connection."""
    told = time.monotonic()
    connection: socket.socket | None = None
    for number in range(count):
        rng = random.Random(f"{report.seed} body {number}")
        sent = _request(rng)
        connection = _exchange(address, connection, sent, report)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            tell(f"HTTP bodies: {number + 1} of {count} calls, {report.num_faults} faults")
    if connection is not None:
        connection.close()


def resend(address: str, call: Mapping[str, Any]) -> str:
    """Sends a request again that met a fault; what came of it."""
    report = Report(0, Path())
    sent = Sent(call["kind"], bytes.fromhex(call["data"]), call["whole"], call["closes"])
    connection = _exchange(address, None, sent, report)
    if connection is not None:
        connection.close()
    return report.text()


def _exchange(address: str, connection: socket.socket | None, sent: Sent, report: Report) -> socket.socket | None:
    """Sends a request and judges its answer; returns the connection while it can be used."""
    host, _, port = address.rpartition(":")
    if connection is None:
        connection = socket.create_connection((host, int(port)), PATIENCE)
    begin, status, problem = time.monotonic(), "no answer", ""
    keep = False
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent.data)
        if sent.whole:
            answer = http.client.HTTPResponse(connection, method=sent.data.split(b" ", 1)[0].decode("latin-1"))
            answer.begin()
            body = answer.read()
            status, keep = str(answer.status), not answer.will_close and not sent.closes
            problem = _judge(answer, body)
    except TimeoutError:
        problem = "" if report.pauses.any_since(begin) else f"no answer in {PATIENCE:.0f} s"
    except (http.client.HTTPException, ConnectionError):
        # It hung up, as it may where requests cannot be told apart any more.
        status, problem = "closed", "" if sent.closes else "it hung up on a request that is whole"
    report.count(f"HTTP body: {sent.kind}", status, time.monotonic() - begin, left=not sent.whole)
    if problem:
        call = {"kind": sent.kind, "data": sent.data.hex(), "whole": sent.whole, "closes": sent.closes}
        report.fault(f"HTTP {sent.kind}", f"{problem}: {sent.data[:300]!r}", call)
    if keep:
        return connection
    connection.close()
    return None


def _judge(answer: http.client.HTTPResponse, body: bytes) -> str:
    """What is wrong with an answer; empty for nothing."""
    if answer.status >= 500:
        return f"status {answer.status}: {body[:300]!r}"
    if answer.status < 400 or not body or not answer.headers.get("content-type", "").startswith("application/json"):
        return ""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        error = json.loads(body)["error"]
        if error["message"] and {"type", "param", "code"} <= error.keys():
            return ""
    return f"an error in another shape: {body[:300]!r}"


def _request(rng: random.Random) -> Sent:
    return rng.choice(_KINDS)(rng, rng.choice(PATHS))


def _message(path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
    own = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in own.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _valid(rng: random.Random, path: str) -> Sent:
    return Sent("valid", _message(path, json.dumps(VALID[path]).encode()))


def _not_json(rng: random.Random, path: str) -> Sent:
    bodies = (
        b"",
        b" ",
        b"{",
        b"hello",
        b"{'a': 1}",
        b"\xff\xfe",
        b"\x00" * 100,
        b'{"a": 1',
        b"[1, 2",
        b'"\\ud800"',
        rng.randbytes(64),
    )
    return Sent("not JSON", _message(path, rng.choice(bodies)))


def _odd_json(rng: random.Random, path: str) -> Sent:
    """JSON by the grammar, and what Python's parser takes besides."""
    values: tuple[Any, ...] = (
        *(
            "null",
            "true",
            "1",
            "-0",
            "[]",
            "{}",
            '""',
            "NaN",
            "Infinity",
            "1e400",
            "1" * 5000,
            '{"a":' * 500 + "1" + "}" * 500,
        ),
        *("[" * 200_000, '{"prompt": "a", "prompt": 1}', '{"prompt": "\\ud800"}', '{"\\ud800": 1}', '{"": ""}'),
        *('{"prompt": ' + "[" * 900 + "]" * 900 + "}", '{"messages": [' + ",".join(["{}"] * 2000) + "]}"),
    )
    return Sent("odd JSON", _message(path, rng.choice(values).encode()))


def _one_field_odd(rng: random.Random, path: str) -> Sent:
    """A valid body with one field of another type, or at an edge."""
    body = dict(VALID[path])
    names = (
        *body,
        "model",
        "n",
        "stream",
        "stop",
        "seed",
        "logprobs",
        "retention",
        "eviction_policy",
        "kv_hints",
        "cache_salt",
    )
    odd = (
        None,
        True,
        -1,
        0,
        1.5,
        1 << 32,
        1 << 64,
        10**40,
        "",
        "x" * 70_000,
        "\0",
        "\U0010ffff",
        [],
        [[]],
        [None],
        {},
        {"a": {}},
    )
    body[rng.choice(names)] = rng.choice(odd)
    if "max_tokens" in VALID[path] and not isinstance(body["max_tokens"], int | str | list | dict):
        body["max_tokens"] = 1
    return Sent("one field odd", _message(path, json.dumps(body).encode()))


def _wrong_type(rng: random.Random, path: str) -> Sent:
    kinds = (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/json; charset=utf-16",
        "",
        "x" * 500,
        "a/b;;=",
    )
    return Sent(
        "wrong content type", _message(path, json.dumps(VALID[path]).encode(), {"Content-Type": rng.choice(kinds)})
    )


def _huge(rng: random.Random, path: str) -> Sent:
    """Rarely a body that is sent, mostly one that is only announced."""
    if rng.random() < 0.02:
        return Sent("huge body", _message(path, b'{"prompt": "' + b"a" * HUGE + b'"}'), closes=True)
    length = rng.choice((HUGE, 1 << 40, 1 << 63, 1 << 70))
    return Sent("huge body", _message(path, b"{}", {"Content-Length": str(length)}), closes=True)


def _half_sent(rng: random.Random, path: str) -> Sent:
    whole = _message(path, json.dumps(VALID[path]).encode())
    return Sent("half sent", whole[: rng.randrange(1, len(whole))], whole=False, closes=True)


def _left(rng: random.Random, path: str) -> Sent:
    """The caller is gone before the answer."""
    return Sent("left before the answer", _message(path, json.dumps(VALID[path]).encode()), whole=False, closes=True)


def _chunked(rng: random.Random, path: str) -> Sent:
    body = json.dumps(VALID[path]).encode()
    cut = rng.randrange(1, len(body))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]))
    head = _message(path, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    return Sent("chunked", head + chunks + b"0\r\n\r\n")


def _broken_chunks(rng: random.Random, path: str) -> Sent:
    head = _message(path, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    bad = (
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"-1\r\n{}\r\n",
        b"ffffffffffffffffff\r\n{}\r\n",
        b"2\r\n{}{}{}\r\n0\r\n\r\n",
        b"2;" + b"x" * 5 + b"\r\n{}\r\n0\r\n\r\n",
    )
    return Sent("broken chunks", head + rng.choice(bad), closes=True)


def _broken_head(rng: random.Random, path: str) -> Sent:
    heads = (
        *(
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        ),
        *(
            _message(path, b"{}", {"Content-Length": "x"}),
            _message(path, b"{}", {"Content-Length": "-1"}),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ),
        *(_message(path, b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}), _message(path, b"{}", {"X": "y" * 70_000})),
        *(_message(path, b"{}", {"X\0": "y"}), _message(path, b"{}", {"Transfer-Encoding": "gzip"})),
    )
    # What a parser waits for more of is not answered.
    return Sent("broken head", rng.choice(heads), whole=False, closes=True)


def _other_route(rng: random.Random, path: str) -> Sent:
    method, path = rng.choice(METHODS), rng.choice((*PATHS, *OTHER_PATHS))
    return Sent("other route or method", _message(path, b"", {}, method))


def _odd_headers(rng: random.Random, path: str) -> Sent:
    headers = {
        "X-Request-Id": rng.choice(("é", "x" * 5000, "\t", "a b")),
        "traceparent": rng.choice(("00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 500)),
        "Authorization": rng.choice(("Bearer", "Basic eDp5", "Bearer é", "x" * 3000)),
        "Accept": rng.choice(("", "text/event-stream", "a/b;q=zz")),
        "Accept-Encoding": "br;q=1.0, gzip;q=x",
        "Expect": rng.choice(("", "", "100-continue")),
    }
    sent = _message(path, json.dumps(VALID[path]).encode(), headers)
    return Sent("odd headers", sent)


_KINDS = (
    *(_valid, _not_json, _not_json, _odd_json, _odd_json, _one_field_odd, _one_field_odd, _one_field_odd, _wrong_type),
    *(_huge, _half_sent, _left, _chunked, _broken_chunks, _broken_head, _other_route, _odd_headers),
)
