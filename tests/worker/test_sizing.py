"""How much KV a GPU gets by default: figures of memory are made up, the rehearsal is real, on a pretended device."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.gpu import exactness
from tests.gpu.repeated import Repeated
from tests.worker.pretended import CUDA, pretended
from worker_service import sizing
from worker_service.capacity import DrafterMemory
from worker_service.config import Settings
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.graphs import Graphs, Work
from worker_service.engine.planning import SCORED
from worker_service.engine.self_check import check, own_logits
from worker_service.engine.target import InputSequence, Passed, Target
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel
from worker_service.sizing import by_device, sized

MIB = 1 << 20
A_TOKEN = 3 * 2 * 2 * 32 * 2  # layers, keys and values, heads, numbers, bytes: of the model below


@contextmanager
def a_gpu(free: int, step: int, host: int | None = None) -> Iterator[LoadedModel]:
    """A model on a device with so many bytes free of 1 GiB, whose largest step takes `step`."""
    answers = {"mem_get_info": (free, 1 << 30), "max_memory_allocated": step + 7 * MIB, "memory_allocated": 7 * MIB}
    with pretended(), patch("worker_service.sizing.free_bytes", lambda _: host):
        model = exactness.model_on(CUDA, torch.bfloat16)
        for name, answer in answers.items():
            patch.object(torch.cuda, name, lambda *_, answer=answer: answer).start()
        try:
            yield LoadedModel(model, exactness.tokenizer(), "m", "f", 512, frozenset(), CUDA, torch.bfloat16)
        finally:
            patch.stopall()


def test_kv_gets_what_the_largest_step_leaves() -> None:
    drafter = DrafterMemory(50 * MIB, 64)
    with a_gpu(free=600 * MIB, step=100 * MIB) as model, patch.object(sizing, "drafter_memory", lambda *_: drafter):
        found = sized(Settings(model="m"), model)
    left = 600 * MIB - 100 * MIB - (1 << 30) // 10 - 50 * MIB
    assert found.kv_tokens == found.host_kv_tokens == left // (A_TOKEN + 64)


@pytest.mark.parametrize(("room", "ends"), [(10**6, [512, 512]), (300, [300, 75])])
def test_the_largest_step_is_rehearsed_at_the_end_of_the_longest_texts(room: int, ends: list[int]) -> None:
    """As long as the model's may be; all together as long as the memory that weights leave."""
    passes, forward = list[list[InputSequence]](), Target.forward

    def noted(target: Target, sequences: list[InputSequence]) -> Passed:
        passes.append(sequences)
        return forward(target, sequences)

    told = Settings(model="m", slots=4, max_prefill=200, block_tokens=16)
    with a_gpu(free=room * A_TOKEN, step=0) as model, patch.object(Target, "forward", noted), suppress(ModelError):
        sized(told, model)
    (prompt, *others), *more = passes
    assert not more
    assert (len(prompt.tokens), prompt.start + len(prompt.tokens)) == (200, ends[0])
    assert len(prompt.tokens) - prompt.logits_from == SCORED + 1  # all that a prompt may ask for
    assert [(len(each.tokens), each.start + len(each.tokens)) for each in others] == [(9, ends[1])] * 4
    assert len(prompt.kv.table) == -(-ends[0] // 16)


def test_slots_and_prefill_are_the_largest_whose_step_is_no_burden() -> None:
    """Of what the weights leave it may take a tenth. The smallest sizes are taken in any case."""
    for step, expected in ((50 * MIB, (64, 4096)), (100 * MIB, (4, 1024))):
        with a_gpu(free=600 * MIB, step=step) as model:
            found = sized(Settings(model="m"), model)
            assert (found.slots, found.max_prefill) == expected
            told = sized(Settings(model="m", slots=3), model)
            assert (told.slots, told.max_prefill) == (3, expected[1])


def test_a_step_that_finds_no_memory_is_tried_smaller() -> None:
    rehearsed, real = [], sizing._rehearsed

    def tight(settings: Settings, model: LoadedModel) -> int:
        rehearsed.append(settings.slots)
        if settings.slots > 16:
            raise torch.OutOfMemoryError("no room")
        return real(settings, model)

    with a_gpu(free=600 * MIB, step=MIB) as model, patch.object(sizing, "_rehearsed", tight):
        assert sized(Settings(model="m"), model).slots == 16
    assert rehearsed == [64, 32, 16]


def test_the_host_gives_half_of_its_memory_at_most_unless_it_is_said() -> None:
    with a_gpu(free=600 * MIB, step=0, host=2000 * A_TOKEN) as model:
        assert sized(Settings(model="m"), model).host_kv_tokens == 1000
        assert sized(Settings(model="m", host_kv_tokens=5), model).host_kv_tokens == 5


@pytest.mark.parametrize("slots", [6, 48, 64, 100])
def test_of_graphs_what_the_driver_takes_counts_and_is_given_back(slots: int) -> None:
    """The first one 30 MiB with what all share, any other 1 MiB; then there is again as much as before."""
    free, taken = 600 * MIB, list[int]()

    class Taking(Repeated):
        def __init__(self, work: Work, device: torch.device, like: object) -> None:
            super().__init__(work, device)
            taken.append(30 * MIB if like is None else MIB)
            weakref.finalize(self, taken.remove, taken[-1])

    with (
        a_gpu(free=free, step=0) as model,
        patch.object(Graphs, "kind", Taking),
        patch.object(torch.cuda, "mem_get_info", lambda *_: (free - sum(taken), 1 << 30)),
    ):
        found = sized(Settings(model="m", attention="graphs", slots=slots), model)
    assert taken == []
    left = free - 30 * MIB - 63 * MIB - (1 << 30) // 10
    assert found.kv_tokens == left // A_TOKEN


def test_a_model_is_after_the_rehearsal_what_it_was() -> None:
    """Its own attention is there for the self-check, and its own head."""
    with a_gpu(free=600 * MIB, step=0) as model:
        before = own_logits(model.model, 200)
        sized(Settings(model="m"), model)
        after = own_logits(model.model, 200)
        engine = Engine(
            model.model,
            model.tokenizer,
            eos_ids=frozenset(),
            context_tokens=200,
            blocks=20,
            block_tokens=16,
            drafter=NoDrafter(),
        )
        check(engine, after)
        assert torch.equal(before.logits.cpu(), after.logits.cpu())


def test_a_gpu_without_room_for_one_request_is_refused() -> None:
    with a_gpu(free=110 * MIB, step=20 * MIB) as model, pytest.raises(ModelError, match="too few"):
        sized(Settings(model="m"), model)


@pytest.mark.parametrize(
    ("told", "device", "processes", "expected"),
    [
        ({}, CUDA, 1, True),
        ({"kv_tokens": 32768}, CUDA, 1, False),
        ({}, CUDA, 2, False),
        ({}, torch.device("cpu"), 1, False),
    ],
)
def test_only_a_whole_model_on_a_gpu_is_sized_and_only_where_nobody_says(
    told: Any, device: torch.device, processes: int, expected: bool
) -> None:
    assert by_device(Settings(model="m", **told), device, processes) is expected


def test_what_the_engine_cannot_compute_is_said_in_a_sentence() -> None:
    def broken(*_: object) -> None:
        raise NotImplementedError("no such\nattention")

    said = pytest.raises(ModelError, match="m: the engine cannot serve this LlamaForCausalLM: no such attention")
    with a_gpu(free=600 * MIB, step=0) as model, patch.object(sizing, "Target", broken), said:
        sized(Settings(model="m"), model)
