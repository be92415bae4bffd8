"""Durations as messages have them, and as seconds."""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def seconds(message: Duration) -> float:
    """A message as seconds, also where it is out of range."""
    return message.seconds + message.nanos / 1e9
