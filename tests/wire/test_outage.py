"""Of an outage each reason is logged once."""

from protos.outage import Outage


def test_each_reason_is_told_once_until_there_was_a_connection() -> None:
    outage = Outage()
    assert [outage.is_new(reason) for reason in ("refused", "refused", "wrong name", "refused")] == [1, 0, 1, 0]
    outage.over()
    assert outage.is_new("refused")


def test_reasons_that_are_always_worded_anew_are_told_a_few_times() -> None:
    outage = Outage()
    assert sum(outage.is_new(f"port {port}") for port in range(100)) == 4
