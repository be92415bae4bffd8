"""Converts durations between messages and seconds."""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

# The longest duration of a message: 10,000 years.
MAX_SECONDS = 315_576_000_000


def duration(seconds: float) -> Duration:
    """Converts seconds to a message."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def seconds(message: Duration) -> float:
    """Converts a message to seconds, even if it is out of range."""
    return message.seconds + message.nanos / 1e9
