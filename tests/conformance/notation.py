"""The short forms that cases are written in."""

from typing import Any

from google.protobuf.duration_pb2 import Duration

from protos.kvcache.v1 import kvcache_pb2 as pb


def tokens(text: str) -> list[int]:
    """Token ids: "0..8" both ends included, "1*12" twelve ones, "0..3,9" one after the other."""
    found: list[int] = []
    for part in text.split(","):
        if ".." in part:
            first, last = part.split("..")
            found.extend(range(int(first), int(last) + 1))
        elif "*" in part:
            token, count = part.split("*")
            found.extend([int(token)] * int(count))
        else:
            found.append(int(part))
    return found


def extra_keys(pieces: list[list[Any]]) -> list[pb.ExtraKey]:
    """Content that is no token: [[first token, tokens, name of the content], …]."""
    return [pb.ExtraKey(start=start, length=length, digest=name.encode()) for start, length, name in pieces]


def retention(requested: dict[str, Any]) -> pb.RetentionConfig:
    """{"ranges": [[start, end or null, priority, seconds?], …], "decode": [priority, seconds?]}."""
    config = pb.RetentionConfig()
    for start, end, priority, *seconds in requested.get("ranges", []):
        kept = config.ranges.add(start=start, end=end, retention_priority=priority)
        if seconds:
            kept.retention_duration.CopyFrom(duration(seconds[0]))
    if "decode" in requested:
        config.decode_retention_priority, *seconds = requested["decode"]
        if seconds:
            config.decode_retention_duration.CopyFrom(duration(seconds[0]))
    return config


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
