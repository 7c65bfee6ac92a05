"""Settings that could not work are refused at start."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from scheduler_service.config import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redis_url", "http://somewhere"),
        ("redis_url", "redis+sentinel://one,two"),  # of which primary?
        ("redis_url", "redis+sentinel://one,:26379/main"),
        ("redis_url", "redis+sentinel://one:0/main"),  # nobody listens there
        ("redis_url", "redis://one:0"),
        ("redis_url", "redis://one/first"),  # a database has a number
        ("redis_url", "redis+sentinel://one/main/first"),
        ("redis_url", "redis+sentinel://one,two,one/main"),  # it would be a majority by itself
        ("redis_url", "redis+sentinel://one/main?no_such_option=1"),
        ("redis_url", "redis://one?retry=1"),  # an option of the client library, but not for a URL
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


def test_a_password_of_sentinels_needs_sentinels(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    by_sentinels = {"redis_sentinel_password_file": tmp_path / "password", "redis_url": "redis+sentinel://one,two/main"}
    told = Settings(_cli_parse_args=False, **by_sentinels)  # type: ignore[call-arg,arg-type]
    assert told.redis_options() == {"sentinel_password": "secret"}
    with pytest.raises(ValidationError, match=r"redis_sentinel_password_file is for .*redis\+sentinel"):
        Settings(_cli_parse_args=False, **by_sentinels | {"redis_url": "redis://one"})  # type: ignore[call-arg,arg-type]


def test_reports_of_several_rounds_need_room_for_them_in_max_lag() -> None:
    Settings(_cli_parse_args=False, report_within_ms=50, max_lag=8)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="report_within_ms needs a max_lag of at least 8, not 7"):
        Settings(_cli_parse_args=False, report_within_ms=50, max_lag=7)  # type: ignore[call-arg]
