"""Places in a conversation up to which its prompt is to stay cached, as wishes for ranges of its tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.duration_pb2 import Duration

from protos.kvcache.v1 import kvcache_pb2


class Breakpoint(NamedTuple):
    """A place, and how what is in front of it is to be kept; no duration is without end."""

    message: int
    characters: int
    priority: int
    duration: Duration | None


def ranges(places: Sequence[Breakpoint], ends: Sequence[int]) -> list[kvcache_pb2.RetentionRange]:
    """Wishes from the prompt's beginning on. ends: tokens in front of each place.

    What is in front of a later place is in front of it too: each range is kept as well as any behind it.
    """
    made, start = [], 0
    for index, end in enumerate(ends):
        if end <= start:
            continue
        behind = places[index:]
        lasting = [place.duration for place in behind if place.duration is not None]
        wish = kvcache_pb2.RetentionRange(
            start=start, end=end, retention_priority=max(place.priority for place in behind)
        )
        if len(lasting) == len(behind):
            wish.retention_duration.CopyFrom(max(lasting, key=Duration.ToNanoseconds))
        made.append(wish)
        start = end
    return made
