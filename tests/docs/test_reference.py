"""The reference's tables are what the code declares."""

from pathlib import Path

import pytest

from deploy.reference.pages import PAGES, TABLES, page


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_the_page_is_up_to_date(file: Path) -> None:
    assert file.read_text() == page(file), "run `python -m deploy.reference`"


def test_every_table_is_on_a_page() -> None:
    told = "".join(file.read_text() for file in PAGES)
    assert [name for name in TABLES if f"deploy.reference`: {name} -->" not in told] == []


def test_a_setting_stands_with_its_bounds_and_its_default() -> None:
    assert "|`--slots`|`4`|1–1024|worker|" in TABLES["up"]()
    assert "|`--lease-s`|`0.75`|>0.25|" in TABLES["scheduler"]()


def test_a_service_is_told_only_what_up_does_not_say() -> None:
    assert "`--slots`" not in TABLES["worker"]()
    assert "`--max-backlog-s`|`auto`" in TABLES["scheduler"](), "another default than that of `up`"


def test_a_field_of_http_stands_with_its_bounds() -> None:
    assert "|`n`||integer, 1 to 16|`1`|" in TABLES["generating"]()


def test_a_field_that_must_be_there_is_told_so() -> None:
    assert "|`model`||string|required|" in TABLES["generating"]()
    assert "|`messages`|chats|[Message]|required|" in TABLES["generating"]()
    assert "|`input`|string or [InputItem]|required|" in TABLES["responses"]()
    assert "|`seed`||integer||" in TABLES["generating"]()
