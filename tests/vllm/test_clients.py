"""What clients do while LAPS-SD orders: they leave, they ask for odd things, memory runs out. On the toy executor."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from laps_sd_vllm import status
from laps_sd_vllm.learning import Learning
from laps_sd_vllm.steps import StepDone, StepRow
from tests.vllm.drive import add, run_all, step
from tests.vllm.play import Way, toy_core, ways
from tests.vllm.toy import continued

PLUGIN = "laps_sd_vllm.LapsSdScheduler"
TIGHT = (11, 17)  # blocks: fewer than the running requests need, so that vLLM evicts by itself


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_CACHE_ROOT", str(tmp_path))


def plugin(way: Way, slots: int | None = 2, arguments: dict[str, Any] | None = None, **asked: Any) -> Any:
    ours = {"mode": "order", "slots": slots, "learned": False, "compare": False, "predictor": "none"} | asked
    return toy_core(way, PLUGIN, additional_config={"laps_sd": ours}, **(arguments or {}))


def paused(core: Any) -> list[str]:
    return list(core.scheduler._paused)


def whole(core: Any, free: int) -> None:
    """Nothing is left, and LAPS-SD still orders."""
    scheduler = core.scheduler
    assert not scheduler.fallen, scheduler.advice.status.why
    assert (scheduler.free_blocks, scheduler.requests, scheduler._paused) == (free, {}, {})
    assert scheduler.advice.ordering.core.fleet.entries == {}
    assert scheduler.advice.watch.live == {}


WAYS = [Way(False, False, 4), Way(False, True, 4), Way(True, True, 4)]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_client_may_leave_while_its_request_is_paused(way: Way, did: Counter[str]) -> None:
    core = plugin(way)
    free, texts = core.scheduler.free_blocks, dict[str, list[int]]()
    for id in ("a", "b"):
        add(core, id, [700] * 40, 200)
    left = None
    for number in range(400):
        if number % 4 == 1 and number < 60:
            add(core, f"short{number}", [600 + number] * 9, 12)
        if left is None and paused(core):
            left = paused(core)[0]
            core.abort_requests([left])
            did["aborts of paused ones"] += 1
        for id, (tokens, _) in step(core).items():
            texts.setdefault(id, []).extend(tokens)
        did["steps"] += 1
        did["pauses"] += len(paused(core))
    run_all(core)
    assert left in ("a", "b")
    whole(core, free)
    for id, text in texts.items():
        prompt, most = ([600 + int(id[5:])] * 9, 12) if id.startswith("short") else ([700] * 40, 200)
        assert text == continued(prompt, most)[: len(text)]
        assert len(text) == most or id == left


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_clients_may_leave_before_their_request_ran(way: Way) -> None:
    core = plugin(way)
    free = core.scheduler.free_blocks
    for number in range(8):
        add(core, f"r{number}", [600 + number] * 30, 40)
    step(core)
    waiting = [id for id, request in core.scheduler.requests.items() if not request.num_computed_tokens]
    assert len(waiting) > 4
    core.abort_requests(waiting)
    texts = run_all(core)
    assert not set(waiting) & set(texts)
    whole(core, free)


@pytest.mark.parametrize("way", list(ways(blocks=TIGHT)), ids=str)
def test_where_vllm_takes_memory_by_itself_every_text_is_whole(way: Way, did: Counter[str]) -> None:
    """Prompts of several chunks, some with the same beginning, and answers that outgrow the memory."""
    core = plugin(way, 6, {"max_model_len": 288})
    free, rng, told = core.scheduler.free_blocks, random.Random(5), core.scheduler.on_step
    shared = [rng.randrange(600, 1000) for _ in range(70)]

    def count(done: Any) -> None:
        did["evictions"] += sum(row.evicted for row in done.rows)
        told(done)

    core.scheduler.on_step = count
    jobs = {}
    for number in range(14):
        own = [rng.randrange(600, 1000) for _ in range(rng.randint(5, 90))]
        jobs[f"r{number}"] = (shared + own if number % 2 else own, rng.randint(4, 110))
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    todo = list(jobs)
    while todo or core.scheduler.has_requests() or core.batch_queue:
        if todo and rng.random() < 0.4:
            add(core, id := todo.pop(), *jobs[id])
        for id, (tokens, _) in step(core).items():
            texts[id] += tokens
        did["steps"] += 1
        did["pauses"] += len(paused(core))
    assert texts == {id: continued(*job) for id, job in jobs.items()}
    whole(core, free)


def test_when_all_that_is_cached_is_given_up_every_text_is_whole() -> None:
    """vLLM does that where somebody changes the weights: it evicts whoever runs, paused ones too."""
    core = plugin(WAYS[0])
    free = core.scheduler.free_blocks
    jobs = {f"r{number}": ([600 + number] * 40, 60 if number < 3 else 6) for number in range(9)}
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    todo = list(jobs)
    while not paused(core):
        if todo:
            add(core, id := todo.pop(0), *jobs[id])
        for id, (tokens, _) in step(core).items():
            texts[id] += tokens
    for id in todo:
        add(core, id, *jobs[id])
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert core.scheduler.free_blocks == free
    for id, tokens in run_all(core).items():
        texts[id] += tokens
    assert texts == {id: continued(*job) for id, job in jobs.items()}
    whole(core, free)


@pytest.mark.parametrize("mode", ["observe", "order"])
@pytest.mark.parametrize(("stop", "lessons"), [(["\n"], 1), (None, 0)])
def test_what_came_to_a_stop_string_teaches_its_length(mode: str, stop: list[str] | None, lessons: int) -> None:
    """vLLM's front end finds the string, and aborts the request as it does where a client has left."""
    core = plugin(WAYS[0], mode=mode)
    add(core, "a", [700] * 9, 50, stop=stop, **({"detokenize": True} if stop else {}))
    for _ in range(4):
        step(core)
    core.abort_requests(["a"])
    advice = core.scheduler.advice
    assert (advice.status.finished, advice.learning.length.finished) == (lessons, lessons)
    assert len(list(advice.watch._recent)) == lessons


class Grammars:
    """In place of vLLM's, which need a tokenizer. They allow everything."""

    def grammar_bitmask(self, *_: Any) -> None:
        return None

    def accept_tokens(self, *_: Any) -> bool:
        return True


def add_with_grammar(core: Any, id: str) -> Any:
    """It waits for its grammar. Returns where that goes once it is there."""
    core.scheduler.structured_output_manager = Grammars()
    add_request, structure = core.add_request, StructuredOutputRequest(StructuredOutputsParams(json="{}"))

    def blocked(request: Any, *more: Any) -> None:
        request.structured_output_request = structure
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        add_request(request, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "add_request", blocked)
        add(core, id, [700] * 9, 5)
    return structure


def test_those_whose_grammars_are_compiled_take_nobodys_place() -> None:
    core = plugin(Way(False, False, 0))
    grammars = [add_with_grammar(core, f"g{number}") for number in range(40)]
    add(core, "long", [700] * 90, 50)
    texts: dict[str, list[int]] = {}
    for _ in range(60):
        for id, (tokens, _) in step(core).items():
            texts.setdefault(id, []).extend(tokens)
    assert texts == {"long": continued([700] * 90, 50)}
    core.abort_requests(["g0"])
    for grammar in grammars:
        grammar.grammar = True
    assert run_all(core) == {f"g{number}": continued([700] * 9, 5) for number in range(1, 40)}
    assert not core.scheduler.fallen
    assert core.scheduler.advice.ordering.core.fleet.entries == {}


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    core = plugin(Way(False, False, 0))
    add_with_grammar(core, "bad").grammar = ValueError("no grammar")
    add(core, "good", [700] * 9, 5)
    assert run_all(core)["good"] == continued([700] * 9, 5)
    assert not core.scheduler.requests
    assert not core.scheduler.fallen, core.scheduler.advice.status.why


@pytest.mark.parametrize("mode", ["observe", "order"])
def test_what_ends_with_an_error_teaches_nothing(mode: str) -> None:
    core = plugin(WAYS[0], mode=mode)
    add(core, "a", [700] * 9, 50)
    for _ in range(4):
        step(core)
    advice, live = core.scheduler.advice, core.scheduler.advice.watch.live
    emitted = live["a"].emitted
    assert emitted
    row = StepRow("a", emitted, [9], status=RequestStatus.FINISHED_ERROR)
    advice.step(StepDone([row], core.scheduler.free_blocks, 0.0, 1.0), 1.0)
    assert (advice.status.finished, advice.learning.length.finished) == (0, 0)
    assert not live
    assert list(advice.watch._recent) == []


def test_once_the_last_answer_came_to_a_stop_string_the_status_tells_of_it() -> None:
    """No step may follow for long."""
    core = plugin(WAYS[0], mode="order")
    advice = core.scheduler.advice
    advice._status_at = float("inf")  # it is not written for any other reason
    add(core, "a", [700] * 9, 50, stop=["."], detokenize=True)
    for _ in range(4):
        step(core)
    core.abort_requests(["a"])
    advice._background.close(60)
    written = status.read(advice._file)
    assert written is not None
    assert written["finished"] == 1


@pytest.mark.parametrize(("ids", "how"), [(None, "FINISHED_ABORTED"), (["a"], "FINISHED_ERROR")])
def test_what_ends_with_the_server_or_an_error_has_come_to_no_stop_string(ids: list[str] | None, how: str) -> None:
    core = plugin(WAYS[0], mode="order")
    add(core, "a", [700] * 9, 50, stop=["."], detokenize=True)
    for _ in range(4):
        step(core)
    core.scheduler.finish_requests(ids, RequestStatus[how])
    assert core.scheduler.advice.learning.length.finished == 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_row_is_enough(way: Way) -> None:
    """--max-num-seqs 1: on the V2 runner a paused request would take the only row, so it gives it up."""
    core = plugin(way, None, {"max_num_seqs": 1})
    free = core.scheduler.free_blocks
    jobs = {f"r{number}": ([600 + number] * (9 + number), 80 if number % 3 == 0 else 5) for number in range(9)}
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    todo = list(jobs)
    while todo or core.scheduler.has_requests() or core.batch_queue:
        if todo:
            add(core, id := todo.pop(0), *jobs[id])
        for id, (tokens, _) in step(core).items():
            texts[id] += tokens
    assert texts == {id: continued(*job) for id, job in jobs.items()}
    whole(core, free)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_while_vllm_begins_no_request_those_that_began_end(way: Way, did: Counter[str]) -> None:
    """Its call /pause waits for them, the paused ones included; after /resume the others run."""
    core = plugin(way)
    free, scheduler = core.scheduler.free_blocks, core.scheduler
    jobs = {f"r{number}": ([600 + number] * 30, 90 if number < 4 else 8) for number in range(12)}
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    todo = list(jobs)
    while len(paused(core)) < 2:
        if todo:
            add(core, id := todo.pop(0), *jobs[id])
        for id, (tokens, _) in step(core).items():
            texts[id] += tokens
        did["pauses"] += len(paused(core))
    for id in todo:
        add(core, id, *jobs[id])
    began = {request.request_id for request in scheduler.running}
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for id, tokens in run_all(core).items():
        texts[id] += tokens
    assert not scheduler.running
    assert {id for id in began if texts[id] == continued(*jobs[id])} == began
    assert set(scheduler.requests) <= set(jobs) - began
    assert scheduler.requests
    scheduler.set_pause_state(PauseState.UNPAUSED)
    for id, tokens in run_all(core).items():
        texts[id] += tokens
    assert texts == {id: continued(*job) for id, job in jobs.items()}
    whole(core, free)


@pytest.mark.parametrize("priority", [-(1 << 63), -1, (1 << 63) - 1])
def test_any_priority_is_a_class(priority: int) -> None:
    core = plugin(WAYS[0])
    add(core, "a", [700] * 9, 5, priority=priority)
    assert run_all(core) == {"a": continued([700] * 9, 5)}
    assert not core.scheduler.fallen


def test_a_tenant_a_request_is_not_remembered_for_good() -> None:
    """Clients choose the names."""
    core = plugin(WAYS[0])
    for number in range(300):
        add(core, f"r{number}", [700] * 9, 2, extra_args={"laps_sd_tenant": f"tenant{number}"})
        if number % 10 == 9:
            run_all(core)
    assert len(core.scheduler.advice.ordering.core.fleet.tenants._tenants) < 50


@pytest.mark.parametrize("broken", ["cut", "flipped", "of another version"])
def test_a_learned_file_that_is_no_good_is_told_and_begun_anew(tmp_path: Path, broken: str) -> None:
    file, told = tmp_path / "kept.learned", list[str]()
    core = plugin(WAYS[0], learned=str(file))
    for number in range(12):
        add(core, f"r{number}", [600 + number] * 9, 9)
    run_all(core)
    core.scheduler.shutdown()
    kept = bytearray(file.read_bytes())
    if broken == "cut":
        kept = kept[: len(kept) // 2]
    elif broken == "flipped":
        kept[len(kept) // 2] ^= 0xFF
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("scheduler_service.learned.SCHEMA", 99)
            core = plugin(WAYS[0], learned=str(file))
            add(core, "again", [700] * 9, 5)
            run_all(core)
            core.scheduler.shutdown()
            kept = bytearray(file.read_bytes())
    file.write_bytes(kept)
    again = Learning(core.scheduler.advice._background, file, False, core.scheduler._served(), 4, told.append)
    assert again.length.finished == 0
    assert [line.partition(": ")[0] for line in told] == [f"{file} cannot be used, so nothing is known yet"]
    core = plugin(WAYS[0], learned=str(file))
    add(core, "anew", [700] * 9, 5)
    run_all(core)
    core.scheduler.shutdown()
    assert (
        Learning(
            core.scheduler.advice._background, file, False, core.scheduler._served(), 4, told.append
        ).length.finished
        == 1
    )
