"""Settings that could not work are refused at start."""

import pytest
from pydantic import ValidationError

from scheduler_service.config import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redis_url", "http://somewhere"),
        ("keep_s", 10**18),  # more than Redis can wait: no request could end
        ("prefill_chunk", 2**32),  # more than a command can say
        ("max_lag", 2**32),
        ("report_within_ms", 1001),
        ("policy", "nonesuch"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(_cli_parse_args=False, **{name: value})  # type: ignore[call-arg,arg-type]


def test_reports_of_several_rounds_need_room_for_them_in_max_lag() -> None:
    Settings(_cli_parse_args=False, report_within_ms=50, max_lag=8)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="report_within_ms needs a max_lag of at least 8, not 7"):
        Settings(_cli_parse_args=False, report_within_ms=50, max_lag=7)  # type: ignore[call-arg]
