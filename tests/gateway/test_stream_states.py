"""The tables of a stream's states: what they refuse, and that the documentation draws them."""

from pathlib import Path

import pytest

from gateway.feed import Feed
from gateway.stream_states import FLOW, LIFE, Event, Flow, IllegalEvent, Life, after, mermaid
from protos.link.v1 import gateway_link_pb2 as pb

PAGE = Path(__file__).parents[2] / "gateway" / "streams.md"


@pytest.mark.parametrize("life", [Life.ENDED, Life.FAILED])
def test_a_stream_that_is_over_allows_nothing(life: Life) -> None:
    for event in Event:
        with pytest.raises(IllegalEvent):
            after(LIFE, life, event)


async def test_an_illegal_event_changes_nothing() -> None:
    feed = Feed(pb.Submit(request_id="r"))
    with pytest.raises(IllegalEvent, match="end is not possible in state submitted"):
        feed.on(Event.END)
    assert (feed.life, feed.flow) == (Life.SUBMITTED, Flow.FLOWING)


def test_whatever_the_client_does_a_stream_that_it_reads_has_an_answer() -> None:
    for life in filter(lambda life: life.read, Life):
        assert {Event.CANCEL, Event.HANG_UP, Event.DETACH, Event.STEP_ASIDE, Event.GIVE_UP} <= LIFE[life].keys()


def test_a_stream_is_live_as_long_as_the_table_has_its_state() -> None:
    assert {life for life in Life if life.live} == LIFE.keys()


def test_a_live_stream_is_mentioned_on_every_new_link() -> None:
    for life in LIFE:
        assert LIFE[life][Event.LINK][1]


def test_the_drawn_diagrams_are_the_tables() -> None:
    text = PAGE.read_text()
    for table in (LIFE, FLOW):
        assert mermaid(table) in text, f"paste this into {PAGE.name}:\n{mermaid(table)}"  # type: ignore[type-var]
