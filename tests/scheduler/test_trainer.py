"""The process that fits the predictor's model: it may die, hang, or outlive nobody."""

import asyncio
import contextlib
import os
import subprocess
import sys

import psutil
import pytest

from scheduler_service.predictor.fit import fit
from scheduler_service.predictor.window import Snapshot, Window
from scheduler_service.store import MemoryStore
from scheduler_service.trainer import Trainer, TrainingFailed
from tests.scheduler.test_learning import GatedTrainer, finish, new
from tests.waiting import until


def snapshot() -> Snapshot:
    learning = new(MemoryStore(), GatedTrainer())
    finish(learning)
    assert learning._predictor is not None
    return learning._predictor.known()


async def test_the_training_process_fits_what_is_fitted_here_and_serves_again_after_its_death() -> None:
    trainer, what = Trainer(), snapshot()
    try:
        first = await trainer.fit(what)
        assert first.weights == pytest.approx(fit(Window.of(what)).weights)
        assert trainer._process is not None
        trainer._process.kill()
        await trainer._process.wait()
        assert (await trainer.fit(what)).weights == pytest.approx(first.weights)
    finally:
        await trainer.close()


async def test_a_training_process_that_does_not_answer_is_ended() -> None:
    trainer = Trainer((sys.executable, "-c", "import time; time.sleep(60)"), deadline_s=0.3)
    pids = {child.pid for child in psutil.Process().children()}
    with pytest.raises(TrainingFailed):
        await trainer.fit(snapshot())
    assert {child.pid for child in psutil.Process().children()} <= pids


async def test_a_training_process_ends_with_its_scheduler() -> None:
    code = """
import asyncio, os, signal
from tests.scheduler.test_trainer import Trainer, snapshot
async def main():
    trainer = Trainer()
    await trainer.fit(snapshot())
    print(trainer._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    run = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    pid = int(run.stdout)

    async def gone() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    await until(gone)
    assert pid != os.getpid()
