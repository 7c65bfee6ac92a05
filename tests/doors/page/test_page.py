"""The live page in a real browser: one visit to a stack on the real model, idle at first and then under load, and what
was seen in it, thought by thought; and a visit to a page that asks for a key."""

from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.keys import Right, new_key
from tests.doors.page.browser import visit
from tests.e2e.stack import running_stack
from tests.gateway.page.pages import page, waiting

MODEL = "smollm2-135m"
Seen = dict[str, Any]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Under `laps-sd`, which keeps several levels and pauses requests soon."""
    folder = tmp_path_factory.mktemp("stack")
    async with running_stack(MODEL, folder, "--slots", "2", "--policy", "laps-sd") as stack:
        return await visit("visit", f"http://{stack.http}/")


async def test_an_idle_service_says_what_to_do(seen: Seen) -> None:
    assert seen["live"] == "live"
    assert "Nothing runs at the moment." in seen["empty"]
    assert "laps-sd loadtest" in seen["empty"]
    assert "worker-0" in seen["workers"]


async def test_a_bar_grows_while_its_request_runs(seen: Seen) -> None:
    assert len(seen["bars"]) > 2
    assert seen["bars"] == sorted(set(seen["bars"]))


async def test_rounds_show_own_tokens_accepted_guesses_and_rejected_ones(seen: Seen) -> None:
    assert seen["cells"]


async def test_a_paused_request_tells_why(seen: Seen) -> None:
    assert "paused" in seen["paused"]
    assert "they " in seen["paused"] or "It is next" in seen["paused"]


async def test_a_waiting_request_tells_its_place(seen: Seen) -> None:
    assert "Waited" in seen["waiting"]
    assert "go first" in seen["waiting"] or "goes first" in seen["waiting"] or "tarts" in seen["waiting"]


async def test_the_queue_is_shown_by_level(seen: Seen) -> None:
    assert seen["squares"] > 0
    assert seen["queue"]


async def test_policies_are_compared_on_what_just_ended(seen: Seen) -> None:
    table = "\n".join(seen["policies"])
    assert all(name in table for name in ("fcfs", "gittins", "laps-sd", "oracle"))
    assert table.count("serves now") == 1


async def test_a_prompt_sent_by_keyboard_is_answered_and_its_request_marked(seen: Seen) -> None:
    assert "yours" in seen["yours"]
    assert len(seen["answered"]) > 3
    assert " tokens in " in seen["state"]


async def test_no_text_of_a_request_is_among_the_figures(seen: Seen) -> None:
    assert "color" not in seen["elsewhere"].lower()


async def test_the_keyboard_reaches_everything_and_shows_where_it_is(seen: Seen) -> None:
    assert set(seen["usable"]) <= set(seen["reached"])
    assert seen["unseen"] == []


async def test_nothing_leaves_the_screen_at_any_width(seen: Seen) -> None:
    for look in seen["looks"]:
        assert look["wide"] <= look["width"], look
        assert look["beyond"] == [], look


async def test_it_is_dark_or_light_as_the_reader_wants(seen: Seen) -> None:
    shades = {look["scheme"]: (look["backgroundColor"], look["color"]) for look in seen["looks"]}
    assert shades["light"] != shades["dark"]


async def test_nothing_moves_for_those_who_do_not_want_it(seen: Seen) -> None:
    assert seen["motion"] == 0


async def test_no_error_is_logged_and_no_other_host_is_asked(seen: Seen) -> None:
    # The load of this visit presses the button for samples while they still run, which is refused.
    assert [error for error in seen["errors"] if "429" not in error] == []
    assert seen["foreign"] == []
    # Chromium calls a body aborted that a script reads piece by piece, at its end, when all of it was read.
    assert [failed for failed in seen["failed"] if "/page/prompt" not in failed] == []


async def test_ids_and_tenants_are_text_whatever_they_say() -> None:
    harm = "<img src=x onerror='window.harm=true'><script>window.harm=true</script>"
    async with page() as (served, scheduler, _, _):
        scheduler.known["a"] = waiting(harm, tenant=harm, passed_by=[harm], worker_id=harm)
        scheduler.told.workers.add(worker_id=harm, slots=1)
        seen = await visit("hostile", f"http://{served.http}/")
    assert "<script>" in seen["rows"]
    assert (seen["made"], seen["ran"], seen["foreign"]) == (0, False, [])


async def test_a_key_opens_the_page_once_and_is_nowhere_afterwards(tmp_path: Path) -> None:
    key, line = new_key("ops", [Right.ADMIN, Right.GENERATE])
    (tmp_path / "keys").write_text(line + "\n")
    async with page(api_keys=tmp_path / "keys") as (served, _, _, _):
        seen = await visit("login", f"http://{served.http}/", key)
    assert seen["asked"]
    assert "Not let in" in seen["refused"]
    assert seen["live"], "the cookie opens the feed"
    assert seen["again"], "also after the page was loaded anew"
    assert seen["out"], "and no longer after logging out"
    assert seen["kept"] == "", "the next person at this browser reads nothing of it"
    assert (seen["left"], seen["readable"], key in seen["addresses"]) == ("", "", False)
    assert seen["foreign"] == []


async def test_a_page_whose_connection_is_cut_or_forgotten_connects_again() -> None:
    async with page() as (served, _, _, _):
        seen = await visit("reconnect", f"http://{served.http}/")
    assert seen["live"]
    assert seen["cut"], "the reader is told"
    assert seen["again"]
    assert all(seen["forgotten"].values())
