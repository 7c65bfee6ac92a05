"""Whatever of ours fails, and wherever, vLLM goes on in its own order, and every text is whole."""

import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.drive import add, step
from tests.vllm.play import Way, toy_core
from tests.vllm.toy import continued

OURS = ("/laps_sd_vllm/", "/scheduler_service/", "/worker_service/")
# These are vLLM's own names, or what an error ends with: they call what is ours by `_safely`, and do nothing else.
VLLMS = {
    "schedule", "update_from_output", "add_request", "finish_requests", "get_request_counts", "shutdown", "_safely",
    "make_spec_decoding_stats", "_preempt_request", "_free_request", "_update_request_with_output", "_fall_back",
    "release",
}  # fmt: skip
SETTINGS = {"mode": "order", "slots": 3, "learned": False, "compare": False}
WAYS = [Way(False, False, 4, 40), Way(False, True, 4, 40), Way(True, True, 4, 40)]


class Sabotage(Exception):
    pass


def points(frame: FrameType) -> CodeType | None:
    code = frame.f_code
    ours = any(part in code.co_filename for part in OURS)
    return code if ours and not VLLMS & set(code.co_qualname.split(".")) else None


def game(core: Any, watch: Callable[[FrameType, str, Any], None] | None) -> dict[str, list[int]]:
    """Some requests, one of them aborted. Returns those whose text is wrong. `watch` is asked at each call of a
    step."""
    scheduler, rng = core.scheduler, random.Random(3)
    jobs = {f"r{n}": ([rng.randrange(600, 1000) for _ in range(rng.randint(5, 150))], 5 + 9 * n) for n in range(8)}
    texts: dict[str, list[int]] = {id: [] for id in jobs}
    todo = list(jobs)
    steps = 0
    while todo or scheduler.has_requests() or core.batch_queue:
        sys.setprofile(watch)
        try:
            if todo and steps % 3 == 0:
                add(core, id := todo.pop(), *jobs[id])
            if steps == 20 and "r7" in scheduler.requests:
                core.abort_requests(["r7"])
            told = step(core)
        finally:
            sys.setprofile(None)
        for id, (tokens, _) in told.items():
            texts[id].extend(tokens)
        steps += 1
        assert steps < 2000, "it hangs"
    wanted = {id: continued(*job) for id, job in jobs.items()}
    wanted["r7"] = wanted["r7"][: len(texts["r7"])]
    return {id: text for id, text in texts.items() if text != wanted[id]}


def called(core: Any) -> dict[CodeType, int]:
    """How often each function of ours is called in a whole game."""
    counts: dict[CodeType, int] = {}

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (code := points(frame)) is not None:
            counts[code] = counts.get(code, 0) + 1

    assert game(core, count) == {}
    return counts


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_CACHE_ROOT", str(tmp_path))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.timeout(1800)  # a hundred engines
def test_an_error_at_any_call_of_ours_ends_in_stock_order(way: Way) -> None:
    def new_core() -> Any:
        core = toy_core(way, "laps_sd_vllm.LapsSdScheduler", additional_config={"laps_sd": SETTINGS})
        core.scheduler.advice._say = lambda line: None
        return core

    counts = called(new_core())
    own = [code for code in counts if "/laps_sd_vllm/" in code.co_filename]
    assert len(own) > 30
    assert len(counts) > 80
    core = new_core()
    for code, count in counts.items():
        generates = bool(code.co_flags & inspect.CO_GENERATOR)  # one that is never asked is only closed: no error
        again = "/laps_sd_vllm/" in code.co_filename and not generates
        for number in {1, count // 2} if again and count > 1 else {1}:
            core = _renewed(core, new_core)
            left = [number]

            def fail(frame: FrameType, event: str, _: Any, code: CodeType = code, left: list[int] = left) -> None:
                if event == "call" and frame.f_code is code and left[0]:
                    left[0] -= 1
                    if not left[0]:
                        raise Sabotage(code.co_qualname)

            wrong = game(core, fail)
            assert wrong == {}, code.co_qualname
            if not left[0] and not generates:
                assert core.scheduler.fallen, code.co_qualname
                assert core.scheduler.advice.status.fallbacks == 1
                assert "Sabotage" in core.scheduler.advice.status.why
            if core.scheduler.fallen:
                assert not core.scheduler._paused
                assert core.scheduler.max_num_running_reqs == 12


def _renewed(core: Any, new_core: Callable[[], Any]) -> Any:
    """An engine that has not fallen yet. Whole ones take their time to make."""
    return new_core() if core.scheduler.fallen else core
