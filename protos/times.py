"""Seconds, as our code counts them, and the Timestamps and Durations of the public interface. Microseconds are kept;
what is beyond the range of a message becomes its end."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

MAX_DURATION_S = 315_576_000_000  # 10,000 years
MIN_TIMESTAMP_S = -62_135_596_800  # the first second of the year 1
MAX_TIMESTAMP_S = 253_402_300_799  # the last second of the year 9999


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromMicroseconds(round(max(-MAX_DURATION_S, min(seconds, MAX_DURATION_S)) * 1e6))
    return message


def timestamp(seconds: float) -> Timestamp:
    """`seconds`: since the Unix epoch."""
    message = Timestamp()
    message.FromMicroseconds(round(max(MIN_TIMESTAMP_S, min(seconds, MAX_TIMESTAMP_S)) * 1e6))
    return message


def milliseconds(message: Duration) -> float:
    return seconds(message) * 1e3


def seconds(message: Duration | Timestamp) -> float:
    """Of a Timestamp: since the Unix epoch."""
    return message.seconds + message.nanos / 1e9
