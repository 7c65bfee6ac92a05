"""Seconds become Timestamps and Durations and come back; what no message can hold becomes the end of its range."""

from math import inf

from protos.times import MAX_DURATION_S, MAX_TIMESTAMP_S, MIN_TIMESTAMP_S, duration, milliseconds, seconds, timestamp


def test_microseconds_are_kept() -> None:
    assert seconds(duration(1.000001)) == 1.000001
    assert milliseconds(duration(0.0125)) == 12.5
    assert seconds(timestamp(1_795_362_673.25)) == 1_795_362_673.25


def test_what_is_beyond_the_range_is_its_end() -> None:
    assert seconds(duration(inf)) == MAX_DURATION_S
    assert seconds(duration(-inf)) == -MAX_DURATION_S
    assert seconds(timestamp(1e300)) == MAX_TIMESTAMP_S
    assert seconds(timestamp(-1e12)) == MIN_TIMESTAMP_S
