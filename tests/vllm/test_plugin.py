"""The plug-in in vLLM's own engine, on the toy executor: it orders, or it watches and leaves the order alone."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from laps_sd_vllm import advice, status
from laps_sd_vllm.advice import START, _of_core
from laps_sd_vllm.requests import KEPT_S
from laps_sd_vllm.side_by_side import answer
from laps_sd_vllm.versions import Unsupported
from laps_sd_vllm.watching import MEASURED, OTHERS
from scheduler_service.core.beliefs import FleetAcceptance
from scheduler_service.core.types import RequestClass
from scheduler_service.learned import decode
from scheduler_service.predictor import installed
from scheduler_service.sim.side_by_side import QUESTION
from tests.vllm.drive import add, run_all, step
from tests.vllm.play import Way, toy_core, ways
from tests.vllm.toy import NoKv, TwoGroups, continued

PLUGIN = "laps_sd_vllm.LapsSdScheduler"
needs_scipy = pytest.mark.skipif(not installed(), reason="the predictor learns with scipy, an extra here")
QUIET = {"learned": False, "compare": False, "predictor": "none"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_CACHE_ROOT", str(tmp_path))


def plugin(way: Way | None = None, arguments: dict[str, Any] | None = None, **asked: Any) -> Any:
    config = {"laps_sd": QUIET | asked}
    return toy_core(way or Way(False, False, 4), PLUGIN, additional_config=config, **(arguments or {}))


def serve(core: Any, did: Counter[str], count: int = 24, seed: int = 0) -> list[str]:
    """Requests that come one after the other, in turn long and short ones. Returns those that ended, in order."""
    jobs = {f"s{seed}-{n}": ([600 + seed + n] * (9 + 11 * (n % 7)), 60 if n % 3 else 6) for n in range(count)}
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    todo, ended = list(jobs), list[str]()
    while todo or core.scheduler.has_requests() or core.batch_queue:
        if todo:
            id = todo.pop(0)
            add(core, id, *jobs[id])
        for id, (tokens, over) in step(core).items():
            texts[id].extend(tokens)
            ended += [id] * over
        did["steps"] += 1
        running, _ = core.scheduler.get_request_counts()
        did["pauses"] += len(core.scheduler.running) - running
    assert texts == {id: continued(*job) for id, job in jobs.items()}
    return ended


@pytest.mark.parametrize("way", list(ways(blocks=(60,))), ids=str)
def test_it_orders_and_every_text_is_whole(way: Way, did: Counter[str]) -> None:
    core = plugin(way, mode="order", slots=3)
    free = core.scheduler.free_blocks
    serve(core, did)
    scheduler = core.scheduler
    assert (scheduler.fallen, scheduler.advice.status.fallbacks) == (False, 0)
    assert scheduler.advice.ordering.core.fleet.entries == {}
    assert scheduler.free_blocks == free
    assert scheduler.advice.status.plans > 10


def test_short_requests_overtake_long_ones(did: Counter[str]) -> None:
    """Their bounds are known, and that is all that is."""
    short = {f"s0-{n}" for n in range(24) if n % 3 == 0}
    ordered = serve(plugin(mode="order", slots=2), did)
    watched = serve(plugin(arguments={"max_num_seqs": 2}), did)
    assert max(map(ordered.index, short)) < 12 < max(map(watched.index, short))


def test_a_request_that_is_paused_runs_again_and_ends(did: Counter[str]) -> None:
    before = did["pauses"]
    serve(plugin(Way(False, True, 4), mode="order", slots=1), did)
    assert did["pauses"] > before


def test_where_memory_is_short_nothing_that_holds_it_stands_idle() -> None:
    """As long as a slot is free."""
    core, slots, idle, ran = plugin(Way(False, False, 4, 30), mode="order", slots=10), 10, 0, 0
    for number in range(24):
        add(core, f"r{number}", [600 + number] * (20 + 5 * number), 100)
    while core.scheduler.has_requests():
        step(core)
        running, _ = core.scheduler.get_request_counts()
        ran += running
        if running < slots:
            idle += len(core.scheduler.running) - running
    assert not core.scheduler.fallen
    assert idle < ran // 20


def test_watching_leaves_vllms_order_alone(did: Counter[str]) -> None:
    stock = toy_core(Way(False, False, 4), None, max_num_seqs=3)
    watching = plugin(arguments={"max_num_seqs": 3})
    assert serve(watching, did) == serve(stock, did)
    assert watching.scheduler.advice.status.finished == 24
    assert watching.scheduler.advice.status.plans == 0


def test_watching_takes_what_cannot_be_ordered() -> None:
    assert plugin(arguments={"scheduling_policy": "priority"}).scheduler.settings.mode == "observe"
    with pytest.raises(Unsupported, match="fcfs"):
        plugin(arguments={"scheduling_policy": "priority"}, mode="order")


def test_a_model_without_kv_is_watched() -> None:
    """As encoders are."""
    core = plugin(arguments={"executor": NoKv, "enable_prefix_caching": False})
    assert core.scheduler.kv_cache_config.kv_cache_groups == []
    add(core, "a", [700] * 9, 5)
    run_all(core)
    assert (core.scheduler.fallen, core.scheduler.advice.status.finished) == (False, 1)


@pytest.mark.parametrize("mode", ["observe", "order"])
def test_a_diffusion_model_is_refused(mode: str) -> None:
    """vLLM has a scheduler of its own for it."""
    with pytest.raises(Unsupported, match="diffusion model"):
        plugin(Way(False, False, 0), {"diffusion_config": {"canvas_length": 8}}, mode=mode)


@pytest.mark.parametrize(("name", "value"), [("enable_adaptive_verification", True), ("method", "ngram_gpu")])
def test_how_many_drafts_pay_is_not_judged_by_drafts_that_vllm_left_out(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto, two = (plugin(draft_len=most).scheduler for most in ("auto", 2))
    for scheduler in (auto, two):
        monkeypatch.setattr(scheduler.vllm_config.speculative_config, name, value)
    with pytest.raises(Unsupported, match=r"laps_sd\.draft_len must not be auto"):
        auto._capacity()
    two._capacity()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"mood": "order"}, "laps_sd.mood is not a setting; known: mode, policy"),
        ({"mode": "orders"}, r"laps_sd.mode: .*'observe' or 'order'.*, not 'orders'"),
        ({"slots": 99}, "laps_sd.slots is 99, and --max-num-seqs 12"),
        ({"slots": 0}, r"laps_sd.slots: .*greater than or equal to 1, not 0"),
        ({"policy": "fifo"}, "laps_sd: policy: unknown policy 'fifo'"),
    ],
)
def test_a_bad_setting_is_told_in_one_sentence(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(Unsupported, match=told) as error:
        plugin(**asked)
    assert "\n" not in str(error.value)


def test_a_model_with_two_kinds_of_blocks_is_ordered_too(did: Counter[str]) -> None:
    core = plugin(arguments={"executor": TwoGroups}, mode="order", slots=2)
    assert core.scheduler.advice.ordering.core.fleet.workers["vllm"].up.blocks == core.scheduler.blocks // 2
    serve(core, did)
    assert not core.scheduler.fallen


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_only_a_sliding_window_leaves_room_for_runs(asynchronous: bool) -> None:
    """With others and alone."""
    core = plugin(Way(False, asynchronous, 4, 26), {"executor": TwoGroups}, mode="order", slots=4)
    jobs = {"long": ([700] * 440, 60), "short": ([701] * 40, 60), "longer": ([702] * 460, 50)}
    assert core.scheduler.blocks // 2 < 440 // core.scheduler.block_size
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    for id, job in jobs.items():
        add(core, id, *job)
    for _ in range(400):
        for id, (tokens, _) in step(core).items():
            texts[id].extend(tokens)
    assert not core.scheduler.fallen
    assert texts == {id: continued(*job) for id, job in jobs.items()}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drained", [0, 2])
def test_it_orders_on_after_a_step_whose_output_never_comes(
    asynchronous: bool, drained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM survives a fault with --enable-fault-tolerance: it aborts what it has, and goes on. `drained`: outputs of
    no step, by which 0.33 saves what KV connectors told."""
    core = plugin(Way(False, asynchronous, 4), mode="order", slots=2)
    add(core, "lost", [700] * 9, 50)
    with monkeypatch.context() as broken:
        broken.setattr(core.model_executor, "sample_tokens", None)
        with pytest.raises(TypeError):
            step(core)
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    if core.batch_queue is not None:
        core.batch_queue.clear()
    for _ in range(drained):
        core.scheduler.update_from_output(SchedulerOutput.make_empty(), ModelRunnerOutput([], {}))
    jobs = {f"r{number}": ([701 + number] * 9, 30) for number in range(8)}
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    for id, job in jobs.items():
        add(core, id, *job)
    for _ in range(200):
        for id, (tokens, _) in step(core).items():
            texts[id].extend(tokens)
    assert not core.scheduler.fallen
    assert core.scheduler.advice.ordering.core.fleet.entries == {}
    assert texts == {id: continued(*job) for id, job in jobs.items()}


def test_class_hint_and_tenant_come_from_the_request() -> None:
    core = plugin(mode="order")
    told = {"laps_sd_tokens": 40, "laps_sd_tenant": "alice"}
    add(core, "a", [700] * 9, 50, priority=-3, extra_args=told)
    add(core, "b", [700] * 9, 50, priority=2, salt="pepper")
    add(core, "c", [700] * 9, 50, extra_args={"laps_sd_class": "batch", "laps_sd_tokens": "many"})
    entries = core.scheduler.advice.ordering.core.fleet.entries
    requests = {id: entries[id].request for id in "abc"}
    assert (requests["a"].klass, requests["a"].predicted_tokens, requests["a"].tenant) == (
        RequestClass.INTERACTIVE,
        40,
        "alice",
    )
    assert (requests["b"].klass, requests["b"].tenant) == (RequestClass.BATCH, "pepper")
    assert (requests["c"].klass, requests["c"].predicted_tokens) == (RequestClass.BATCH, None)
    assert core.scheduler.advice.status.bad_hints == 1
    run_all(core)


@pytest.mark.parametrize("name", ["laps_sd_tokens", "laps_sd_class", "laps_sd_tenant"])
@pytest.mark.parametrize("value", [["batch"], {"batch": 1}, float("nan"), True])
def test_no_argument_of_a_client_ends_the_order(name: str, value: object) -> None:
    core = plugin(mode="order")
    add(core, "a", [700] * 9, 5, extra_args={name: value})
    run_all(core)
    assert not core.scheduler.fallen, core.scheduler.advice.status.why


def test_plans_that_take_too_long_three_times_running_end_in_stock_order(did: Counter[str]) -> None:
    core = plugin(mode="order", slots=2, plan_limit_ms=1e-6)
    serve(core, did)
    told = core.scheduler.advice.status
    assert (core.scheduler.fallen, told.fallbacks, told.late_plans) == (True, 1, 3)
    assert told.why == "3 plans in a row took over 1e-06 ms"


@needs_scipy
def test_what_was_learned_is_kept(tmp_path: Path, did: Counter[str]) -> None:
    asked = {"predictor": "online", "learned": str(tmp_path / "kept.learned"), "mode": "order", "slots": 4}
    core = plugin(**asked)
    serve(core, did, 40)
    core.scheduler.shutdown()
    again = plugin(**asked).scheduler.advice
    assert again.learning.length.finished == 40
    assert again.ordering.core.fleet.known.length is again.learning.length
    assert again.learning.predictor.status.finished == 40


def test_what_another_model_taught_is_not_used(tmp_path: Path, did: Counter[str]) -> None:
    """Though its folder has the same name, as in a container."""
    asked = {"learned": str(tmp_path / "kept.learned")}
    core = plugin(**asked)
    serve(core, did)
    core.scheduler.shutdown()
    other = plugin(arguments={"hf_overrides": {"rope_theta": 12345.0}}, **asked)
    assert other.scheduler.advice.learning.length.finished == 0
    assert plugin(**asked).scheduler.advice.learning.length.finished == 24


def test_acceptance_is_of_as_many_drafts(tmp_path: Path, did: Counter[str]) -> None:
    asked = {"learned": str(tmp_path / "kept.learned")}
    core = plugin(Way(False, False, 4), **asked)
    serve(core, did)
    core.scheduler.shutdown()
    same, fewer = (plugin(Way(False, False, drafts), **asked).scheduler.advice.learning for drafts in (4, 1))
    assert same.acceptance == core.scheduler.advice.learning.acceptance
    assert fewer.acceptance == FleetAcceptance.at(1)
    assert fewer.length.finished == 24


def test_a_file_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    scheduler = plugin(learned="~/kept.learned").scheduler
    assert scheduler._learned(tmp_path, 0) == tmp_path / "kept.learned"


def test_what_was_learned_before_a_fall_is_kept(tmp_path: Path, did: Counter[str]) -> None:
    file = tmp_path / "kept.learned"
    core = plugin(learned=str(file), mode="order")
    serve(core, did)
    core.scheduler._fall_back("a test")
    core.scheduler.advice._background.close(60)
    assert decode(file.read_bytes()).length.finished == 24
    core.scheduler.shutdown()
    assert not core.scheduler.advice._file.exists()


def test_each_rank_keeps_a_file_of_its_own(tmp_path: Path) -> None:
    scheduler = plugin(learned=str(tmp_path / "kept.learned")).scheduler
    assert [scheduler._learned(tmp_path, rank).name for rank in (0, 1)] == ["kept.learned", "kept.learned-1"]
    scheduler = plugin(learned=None).scheduler
    assert scheduler._learned(tmp_path, 0) != scheduler._learned(tmp_path, 1)


@needs_scipy
def test_models_are_fitted_beside_the_engine(did: Counter[str]) -> None:
    core = plugin(predictor="online")
    serve(core, did, 40)
    background = core.scheduler.advice._background
    background.close(120)
    core.scheduler.advice._fetch()
    assert core.scheduler.advice.learning.predictor.status.warm


def test_a_learned_file_that_cannot_be_read_is_no_reason_to_stop(tmp_path: Path) -> None:
    file = tmp_path / "kept.learned"
    file.write_bytes(b"nonsense")
    assert plugin(learned=str(file)).scheduler.advice.learning.length.finished == 0


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("vllm.envs.VLLM_CACHE_ROOT", str(tmp_path / "file"))
    core = plugin(learned=None)
    ours, told = core.scheduler.advice, list[str]()
    ours._log = told.append
    for _ in range(3):
        ours._background.start("status", ours._write_status)
        ours._background.close(60)
        ours._fetch()
    assert [line.partition(": [Errno")[0] for line in told] == ["LAPS-SD: status failed"]
    core.scheduler.shutdown()
    assert not core.scheduler.fallen


def test_other_policies_are_tried_on_the_last_minutes(did: Counter[str]) -> None:
    core = plugin(arguments={"max_num_seqs": 2}, compare=True, compare_every_s=3600)
    serve(core, did, 12)
    told = core.scheduler.advice
    told._background.close(120)
    assert set(told.status.policies) == {*OTHERS, MEASURED}
    assert told.status.compared >= 8
    written = status.read(told._file)
    assert written is not None
    assert written["policies"][MEASURED]["mean_s"] > 0
    core.scheduler.shutdown()
    told._write_status()  # of a comparison that takes longer
    assert not told._file.exists()


def test_requests_that_ended_long_ago_are_not_compared(did: Counter[str]) -> None:
    core = plugin()
    serve(core, did, 12)
    told = core.scheduler.advice
    told.watch.compare(_of_core(START), time.time() + 2 * KEPT_S, time.monotonic, told._compared)
    assert told._background._under_way <= {"status", "status at rest"}


@pytest.mark.parametrize("mode", ["observe", "order"])
def test_a_fall_is_told_as_what_it_is(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, told = plugin(mode=mode), list[str]()
    monkeypatch.setattr("laps_sd_vllm.plugin.logger.error", lambda line, *words: told.append(line % words))
    core.scheduler._fall_back("a test")
    assert told == [f"LAPS-SD {mode}s no more, vLLM's own order goes on: a test"]


def test_other_policies_are_simulated_with_the_rule_for_those_who_begin(did: Counter[str]) -> None:
    core = plugin(mode="order")
    assert core.scheduler.advice.watch._fleet.foresight
    assert core.scheduler.advice.ordering.core.fleet.foresight
    core.scheduler.shutdown()


def test_nothing_is_compared_before_the_costs_of_steps_are_known(did: Counter[str]) -> None:
    """They are assumed at first: of a machine that may be a hundred times faster than this one."""
    core = plugin(compare=True, compare_every_s=1)
    serve(core, did, 12)
    assert 8 < core.scheduler.advice._cost_steps < advice.KNOWN_STEPS
    assert "compare" not in core.scheduler.advice._background._under_way
    assert core.scheduler.advice.status.compared == 0


def test_once_nothing_runs_the_status_tells_of_all(did: Counter[str]) -> None:
    core = plugin()
    core.scheduler.advice._status_at = float("inf")  # it is not written for any other reason
    serve(core, did)
    core.scheduler.advice._background.close(60)
    written = status.read(core.scheduler.advice._file)
    assert written is not None
    assert written["finished"] == 24


def test_it_tells_of_all_where_the_last_one_was_broken_off() -> None:
    core = plugin()
    core.scheduler.advice._status_at = float("inf")
    add(core, "ends", [700] * 20, 4)
    add(core, "leaves", [800] * 20, 400)
    while "ends" in core.scheduler.requests:
        step(core)
    core.abort_requests(["leaves"])
    core.scheduler.advice._background.close(60)
    written = status.read(core.scheduler.advice._file)
    assert written is not None
    assert written["finished"] == 1


def test_a_comparison_is_what_the_simulator_says() -> None:
    jobs = [{"id": str(n), "arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 9 if n else 90} for n in range(6)]
    question = {"jobs": jobs, "fleet": {"slots": 1, "draft_len": 0}, "policies": ["fcfs", "oracle"]}
    figures = answer(QUESTION.validate_json(json.dumps(question)))
    assert figures["oracle"]["mean_s"] < 0.5 * figures["fcfs"]["mean_s"]


def test_without_scipy_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "installed", lambda: False)
    with pytest.raises(Unsupported, match=r"pip install 'laps-sd-vllm\[predictor\]', or set it to none"):
        plugin(predictor="online")
