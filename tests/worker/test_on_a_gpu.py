"""The engine's path for a GPU, on a device that is pretended (pretended.py): it mixes no devices and uses no native
kernel, and what a step costs in operations and waits is known. What it costs in time `make gpu-check` measures."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from tests.gpu import bench, exactness, families, preemption
from tests.gpu.plan import PLANS
from tests.gpu.repeated import Repeated
from tests.gpu.sections import Section
from tests.worker.pretended import pretended
from worker_service.bench import floor
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.graphs import Graphs
from worker_service.engine.length_head import LengthHead, LengthHeadConfig, LengthProbe
from worker_service.engine.types import Admission, Limits, Row, Run, Sampling

SMALLEST = PLANS["smallest"]._replace(requests=5, batches=(2,), tokens=3)
GREEDY = Sampling()
MACHINE = floor.Machine(1e12, 1e14)


CHECKS = [exactness.check, bench.check, bench.check_graphs, preemption.check, families.check]


@pytest.mark.parametrize("check", CHECKS, ids=["exact", "bench", "graphs", "preempt", "families"])
@patch.object(floor, "measure", lambda *_: MACHINE)
@patch.object(Graphs, "kind", Repeated)  # there is nothing that could record one
def test_a_section_of_the_gpu_check_runs_and_finds_nothing_wrong(check: Any) -> None:
    with pretended() as device:
        section = Section("cuda:0", SMALLEST, 3600, lambda found: None)
        check(section)
    assert section.found["wrong"] == []
    assert section.found["done"]
    assert device.counts["operations"] > 100


@patch.object(Graphs, "kind", Mock(side_effect=RuntimeError("not permitted")))
def test_the_gpu_check_tells_of_graphs_that_cannot_be_recorded() -> None:
    with pretended():
        section = Section("cuda:0", SMALLEST, 3600, lambda found: None)
        exactness.check_graphs(section)
    assert section.found["wrong"] == ["passes were computed without graphs"] * 2


def decode_step(requests: int, own: Sampling = GREEDY) -> Counter[str]:
    """What one decode step of so many requests costs."""
    cuda = torch.device("cuda", 0)
    with pretended() as device:
        engine = exactness.engine_on(cuda, torch.float32, NoDrafter())
        for i in range(requests):
            engine.admit(Admission(str(i), 1, [7, 8, 9, i], 4, own, Limits(9, ignore_eos=True), salt=str(i)))
        runs = [Run(str(i), 0, 64) for i in range(requests)]
        engine.step(runs, requests)
        device.counts.clear()
        engine.step(runs, requests)
        return Counter(device.counts)


def test_operations_of_a_forward_pass_do_not_grow_with_the_batch() -> None:
    few, more = (decode_step(n) for n in (2, 4))
    assert (
        more["operations"] - few["operations"] == 2
    )  # each request's hidden state is looked at, which launches nothing
    assert few["operations"] <= 420  # three layers in float32; each one is a launch on a GPU
    assert few["to device"] == more["to device"] == 1


@pytest.mark.parametrize("own", exactness.SAMPLINGS, ids=str)
def test_a_step_waits_for_the_device_once_however_large_the_batch_and_whatever_is_asked(own: Sampling) -> None:
    assert [decode_step(n, own)["waits"] for n in (1, 4)] == [1, 1]


@pytest.mark.parametrize("kind", ["head", "the model itself"])
def test_a_drafter_on_the_device_waits_once_for_each_position(kind: str) -> None:
    """Whether to go on with a chain, and what follows in it, is decided on the host."""
    cuda = torch.device("cuda", 0)
    with pretended() as device:
        engine = exactness.engine_on(cuda, torch.float32, exactness._drafters(cuda, torch.float32)[kind])
        for i in range(3):
            engine.admit(Admission(str(i), 1, [7, 8, 9, i], 4, GREEDY, Limits(30, ignore_eos=True), salt=str(i)))
        runs = [Run(str(i), 3, 64) for i in range(3)]
        for _ in range(3):
            engine.step(runs, 3)
        device.counts.clear()
        rows = engine.step(runs, 3).rows
    assert [row.drafted for row in rows] == [3, 3, 3]
    assert device.counts["waits"] == 3 + 1


def test_copies_to_the_host_beside_passes_are_waited_for_by_nobody() -> None:
    """The same copies without a stream of their own wait once for each layer. What comes back is looked at by the
    section `graphs` above."""
    cuda, waits = torch.device("cuda", 0), {}
    for attention in ("torch", "graphs"):
        with pretended() as device, patch.object(Graphs, "kind", Repeated):
            engine = exactness.engine_on(cuda, torch.float32, NoDrafter(), attention)
            engine.admit(Admission("long", 1, list(range(40)), 40, GREEDY, Limits(9)))
            engine.step([Run("long", 0, 64)], 1)
            device.counts.clear()
            engine.offload("long")
            assert engine.held()[0].offloaded == 3
            waits[attention] = device.counts["waits"]
    assert waits == {"torch": 3, "graphs": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_draws_nothing_waits_once_too(dtype: torch.dtype) -> None:
    """So that what it takes is known."""
    with pretended() as device:
        engine = exactness.engine_on(torch.device("cuda", 0), dtype, NoDrafter())
        engine.admit(Admission("long", 1, list(range(40)), 40, GREEDY, Limits(9)))
        device.counts.clear()
        engine.step([Run("long", 0, 8)], 1)
        assert device.counts["waits"] == 1


@pytest.mark.parametrize(("start", "waits"), [(1, 0), (0, 1)], ids=["followed", "read"])
def test_a_probe_sends_one_copy_a_step_and_waits_for_what_it_reads_alone(start: int, waits: int) -> None:
    cuda, size = torch.device("cuda", 0), 16
    with pretended() as device, torch.inference_mode():
        probe = LengthProbe(LengthHead(LengthHeadConfig(1, "", "", size, 32)), cuda)
        rows = [Row(f"{n}", 1, 0, (7,)) for n in range(4)]
        probe.told(rows, range(4), torch.ones(4, size, device=cuda))
        device.counts.clear()
        told = probe.told([replace(row, start=start) for row in rows], range(4), torch.ones(4, size, device=cuda))
        assert [row.remaining is None for row in told] == [start > 0] * 4
        assert (device.counts["to device"], device.counts["waits"]) == (1, waits)


def test_a_tensor_on_the_cpu_is_no_tensor_on_the_device() -> None:
    """The pretended device is strict: without this the tests above would prove nothing."""
    with pretended():
        there, here = torch.ones(3, device="cuda:0"), torch.ones(3)
        with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
            there + here
        with pytest.raises(TypeError, match="can't convert"):
            there.numpy()
        assert (there + there.sum()).tolist() == [4.0, 4.0, 4.0]
