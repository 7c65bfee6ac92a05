"""A stage dies while answers stream: its worker's requests go on elsewhere with their tokens, and it comes back."""

from pathlib import Path

from tests.e2e.stack import running_stack
from tests.e2e.test_failures import texts_around
from tests.waiting import until
from tests.worker.preloaded import Worker


async def test_a_killed_stage_is_a_pause_and_its_worker_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    # Of three requests at least two run over stages: the other worker has one slot.
    async with running_stack(tiny_model, tmp_path, "--stages", "2", "--slots", "2") as stack:
        words = ["--model", str(tiny_model), "--scheduler", stack.scheduler, "--slots", "1", "--threads", "1"]
        words += ["--dtype", "float32", "--device", "cpu", "--worker-id", "whole"]
        whole = Worker(words, tmp_path / "whole.log")
        try:
            await until(lambda: _says(whole.said, "attached"))
            stages = stack.running("worker_service")
            assert len(stages) == 2
            (second,) = [stage for stage in stages if stage.environ()["RANK"] == "1"]
            await texts_around(stack, second.kill)
            assert whole.running()
            log = tmp_path / "up.log"
            await until(lambda: _says(log.read_text, "attached", times=2), timeout_s=120.0)
            assert not {stage.pid for stage in stages} & {stage.pid for stage in stack.running("worker_service")}
        finally:
            whole.kill()
        assert await stack.stop() == 0


async def _says(read, event: str, times: int = 1) -> bool:  # type: ignore[no-untyped-def]
    return bool(read().count(f'"event": "{event}"') >= times)
