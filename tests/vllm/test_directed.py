"""vLLM's own engine on the toy executor: whoever runs, is paused or dropped when, the text is the undisturbed one."""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from laps_sd_vllm import asked, directed, plugin, relied_on, reporting
from laps_sd_vllm.directed import Desired, Place, StepDone
from laps_sd_vllm.versions import Unsupported
from tests.vllm.drive import add, run_all, step
from tests.vllm.play import Way, play, toy_core, ways
from tests.vllm.toy import TwoGroups, continued
from worker_service.vllm_engine import engine

TIGHT = (11, 17)  # blocks: fewer than the running requests need, so that vLLM evicts by itself


@pytest.mark.parametrize("way", list(ways()), ids=str)
def test_pauses_and_drops_at_every_step_change_no_text(way: Way, did: Counter[str]) -> None:
    core = toy_core(way)
    free = core.scheduler.free_blocks
    for seed in range(3):
        played = play(core, seed, did)
        assert played.wrong == []
        assert (played.disorder, played.excess, played.uncounted) == ([], [], [])
        assert played.rows == played.texts
        assert core.scheduler.free_blocks == free


@pytest.mark.parametrize("way", [way for way in ways(blocks=TIGHT) if way.drafts], ids=str)
def test_where_memory_is_short_vllm_takes_it_from_the_worst(way: Way, did: Counter[str]) -> None:
    core = toy_core(way, max_model_len=288)
    free, before = core.scheduler.free_blocks, did["evictions"]
    for seed in range(4):
        played = play(core, seed, did, requests=10)
        assert (played.wrong, played.disorder) == ([], [])
        assert core.scheduler.free_blocks == free
    assert did["evictions"] > before


@pytest.mark.parametrize("way", [Way(False, False, 4), Way(True, True, 4, 60)], ids=str)
def test_a_model_with_sliding_windows_keeps_its_texts(way: Way, did: Counter[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("laps_sd_vllm.directed.Directed.most_groups", 2)
    core = toy_core(way, executor=TwoGroups)
    assert len(core.scheduler.kv_cache_config.kv_cache_groups) == 2
    for seed in range(3):
        assert play(core, seed, did).wrong == []


def test_a_paused_request_stops_nobody() -> None:
    core = toy_core(Way(False, False, 0))
    for id in ("a", "b", "c"):
        add(core, id, [700] * 40, 30)
    core.scheduler.desired = Desired([Place("a"), Place("b")], 2)
    for _ in range(5):
        step(core)
    core.scheduler.desired = Desired([Place("c")], 2)
    texts: dict[str, list[int]] = {}
    for _ in range(40):
        for id, (tokens, _) in step(core).items():
            texts.setdefault(id, []).extend(tokens)
    assert texts == {"c": continued([700] * 40, 30)}
    assert core.scheduler.get_request_counts() == (0, 2), "paused ones count as waiting"


def test_a_paused_request_keeps_its_blocks_and_a_dropped_one_does_not() -> None:
    core = toy_core(Way(False, False, 0))
    add(core, "a", [700] * 40, 30)
    core.scheduler.desired = Desired([Place("a")], 1)
    for _ in range(5):
        step(core)
    held = core.scheduler.private_blocks("a")
    core.scheduler.desired = Desired([], 1)
    step(core)
    assert core.scheduler.private_blocks("a") == held > 0
    core.scheduler.drop("a")
    assert core.scheduler.private_blocks("a") == 0
    assert core.scheduler.prefill_owed("a") > 40


def test_the_worst_paused_request_makes_room_for_a_row_of_the_v2_runner() -> None:
    core = toy_core(Way(True, False, 0), max_num_seqs=2)
    for id in ("a", "b", "c"):
        add(core, id, [700] * 40, 30)
    texts: dict[str, list[int]] = {id: [] for id in ("a", "b", "c")}
    done: list[StepDone] = []
    core.scheduler.on_step = done.append
    for desired in (Desired([Place("a"), Place("b")], 2), Desired([Place("c"), Place("a"), Place("b")], 1)):
        core.scheduler.desired = desired
        for id, (tokens, _) in step(core).items():
            texts[id] += tokens
    assert {request.request_id for request in core.scheduler.running} == {"c", "a"}
    assert [row.request_id for row in done[-1].rows if row.evicted] == ["b"]
    core.scheduler.desired = None
    for id, tokens in run_all(core).items():
        texts[id] += tokens
    assert texts == dict.fromkeys(("a", "b", "c"), continued([700] * 40, 30))


def test_without_a_wish_it_is_vllms_own_order_again() -> None:
    core = toy_core(Way(False, True, 4, 40))
    prompts = {f"r{number}": [700 + number] * (20 + 9 * number) for number in range(9)}
    for id, prompt in prompts.items():
        add(core, id, prompt, 40)
    texts: dict[str, list[int]] = {id: [] for id in prompts}
    for number in range(12):
        core.scheduler.desired = Desired([Place(f"r{(number + 4) % 9}"), Place(f"r{number % 9}")], 2)
        for id, (tokens, _) in step(core).items():
            texts[id].extend(tokens)
    core.scheduler.desired = None
    for id, tokens in run_all(core).items():
        texts[id].extend(tokens)
    assert texts == {id: continued(prompt, 40) for id, prompt in prompts.items()}
    assert core.scheduler.max_num_running_reqs == 12


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_ends_at_the_token_that_its_stop_says(asynchronous: bool) -> None:
    core = toy_core(Way(False, asynchronous, 4))
    asked: list[int] = []

    def stops(request: Any, token: int) -> bool:
        asked.append(token)
        return len(asked) == 17

    core.scheduler.stops = stops
    done: list[StepDone] = []
    core.scheduler.on_step = done.append
    add(core, "a", [700] * 40, 60)
    assert run_all(core) == {"a": continued([700] * 40, 17)}
    rows = [row for one in done for row in one.rows if row.status is not None]
    assert [(row.status.name, row.stop_reason) for row in rows] == [("FINISHED_STOPPED", "stop string")]
    assert asked[:17] == continued([700] * 40, 17)


def test_aborted_requests_leave_nothing() -> None:
    core = toy_core(Way(False, False, 0))
    free = core.scheduler.free_blocks
    for id in ("runs", "paused", "waits"):
        add(core, id, [700] * 40, 30)
    core.scheduler.desired = Desired([Place("runs"), Place("paused")], 2)
    step(core)
    core.scheduler.desired = Desired([Place("runs")], 2)
    step(core)
    core.abort_requests(["runs", "paused", "waits"])
    run_all(core)
    assert core.scheduler.free_blocks == free
    assert not core.scheduler.requests
    assert core.scheduler.get_request_counts() == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"scheduling_policy": "priority"}, "fcfs"),
        ({"executor": TwoGroups}, "2 kinds of KV blocks"),
        ({"prefill_schedule_interval": 2}, "--prefill-schedule-interval must be 1"),
        ({"watermark": 0.1}, "--watermark must be 0"),
        ({"max_num_active_seqs": 3}, "--max-num-active-seqs must not be below --max-num-seqs"),
    ],
)
def test_what_was_never_tried_is_refused_in_one_sentence(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(Unsupported, match=word) as told:
        toy_core(Way(False, False, 0), **arguments)
    assert "\n" not in str(told.value)


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.47.1")
    with pytest.raises(Unsupported, match=r"vLLM 0\.47\.1 is not supported: LAPS-SD was tested with 0\.32 and 0\.33"):
        toy_core(Way(False, False, 0))


@pytest.mark.parametrize(
    ("names", "what"), [("METHODS", "scheduler"), ("ATTRIBUTES", "scheduler"), ("REQUEST", "request")]
)
def test_a_vllm_that_lacks_something_is_refused(names: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relied_on, names, ("_gone",))
    with pytest.raises(Unsupported, match=f"its {what} lacks _gone"):
        toy_core(Way(False, False, 0))


def test_an_engine_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = toy_core(Way(False, False, 0))
    relied_on.check_engine(core)
    monkeypatch.setattr(relied_on, "ENGINE", ("_gone",))
    with pytest.raises(Unsupported, match="its engine lacks _gone"):
        relied_on.check_engine(core)


def test_all_that_is_used_of_vllms_own_objects_is_checked() -> None:
    """By the names that our sources give them."""
    core = toy_core(Way(False, False, 0), None)
    add(core, "a", [700] * 9, 5)
    request = core.scheduler.requests["a"]
    of_scheduler, of_request = set[str](), set[str]()
    for file in (directed, reporting, plugin, relied_on, asked):
        for node in ast.walk(ast.parse(Path(str(file.__file__)).read_text())):
            if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                if owner in ("self", "super()", "scheduler") and hasattr(core.scheduler, node.attr):
                    of_scheduler.add(node.attr)
                if owner == "request" and hasattr(request, node.attr):
                    of_request.add(node.attr)
    assert of_scheduler - {*relied_on.ATTRIBUTES, *relied_on.METHODS} == set()
    assert of_request - {*relied_on.REQUEST} == set()
    used = set(re.findall(r"self\._core\.(\w+)", Path(str(engine.__file__)).read_text()))
    assert used == set(relied_on.ENGINE)
