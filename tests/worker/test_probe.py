"""A probe of remaining length in the engine: when it reads, what it reads, and that it changes nothing else."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from tests.worker.harness import Driver, Tiny
from worker_service.engine import length_head
from worker_service.engine.length_head import (
    BINS,
    LengthHead,
    LengthHeadConfig,
    LengthProbe,
    load_length_head,
    middle,
    save_length_head,
)
from worker_service.engine.types import Finish, Limits, Remaining, Row, Run, Sampling
from worker_service.model_files import ModelError
from worker_service.probes import make_probe
from worker_service.reporting import Report
from worker_service.wire import of_report

EVERY = 8
CPU = torch.device("cpu")


@pytest.fixture
def head(tiny: Tiny) -> LengthHead:
    torch.manual_seed(0)
    size = tiny.model.config.hidden_size
    return LengthHead(LengthHeadConfig(length_head.VERSION, "tiny", "a fingerprint", size, EVERY))


def driven(tiny: Tiny, probe: LengthProbe | None, **options: Any) -> Driver:
    driver = Driver(tiny.engine(probe=probe, **options))
    for number, text in enumerate(("The quick brown fox", "A queue", "One two three four five")):
        sampling = Sampling(temperature=0.9, seed=number)
        driver.admit(f"{number}", tiny.prompt(text), Limits(60, ignore_eos=True), sampling)
    return driver


def read(driver: Driver) -> Iterator[tuple[Row, Remaining]]:
    return ((row, row.remaining) for row in driver.rows if row.remaining is not None)


def test_it_reads_at_the_first_token_and_whenever_so_many_more_have_come(tiny: Tiny, head: LengthHead) -> None:
    driver = driven(tiny, LengthProbe(head, CPU))
    driver.finish_all()
    for row in driver.rows:
        end = row.start + len(row.tokens)
        due = row.tokens and not row.finish and (row.start == 0 or row.start // EVERY != end // EVERY)
        assert (row.remaining is not None) == bool(due)
        assert row.remaining is None or row.remaining.after == end
    assert len(list(read(driver))) >= 3 * (60 // EVERY)


def test_texts_are_the_same_with_it(tiny: Tiny, head: LengthHead) -> None:
    drivers = [driven(tiny, probe) for probe in (None, LengthProbe(head, CPU))]
    for driver in drivers:
        driver.finish_all()
    assert drivers[0].outputs == drivers[1].outputs


def test_it_reads_the_targets_own_states(tiny: Tiny, head: LengthHead) -> None:
    """By the reference: hidden states of the whole text at once, and their mean token by token."""
    driver = driven(tiny, LengthProbe(head, CPU))
    driver.finish_all()
    for row, remaining in read(driver):
        prompt = driver.admitted[row.request_id][0]
        text = torch.tensor([[*prompt, *driver.outputs[row.request_id]]])
        with torch.inference_mode():
            states = tiny.model.model(text, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
            seen = states[: remaining.after]
            mean = torch.zeros_like(seen[0])
            for number, state in enumerate(seen, 1):
                mean = mean + (state - mean) / min(number, length_head.WINDOW)
            logs = head(seen[-1:], mean[None], torch.tensor([row.start == 0]))[0]
        expected = (-16 * logs).round().clamp(0, 255).tolist()
        assert list(remaining.chances) == pytest.approx(expected, abs=1.01)  # rounding


def test_readings_survive_disturbances(tiny: Tiny, head: LengthHead) -> None:
    """KV that is lost, offloaded or moved: what is read stays a distribution of the right place."""
    driver = driven(tiny, LengthProbe(head, CPU), blocks=40, host_blocks=20)
    driver.disturb(Random(5), 80, slots=2)
    driver.finish_in_little_memory()
    for row, remaining in read(driver):
        assert remaining.after == row.start + len(row.tokens)
        assert sum(2.718281828 ** (-q / 16) for q in remaining.chances) == pytest.approx(1, abs=0.1)


def test_what_it_keeps_of_requests_is_bounded(head: LengthHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_head, "MOST", 3)
    probe, size = LengthProbe(head, CPU), head.config.hidden_size
    for number in range(9):
        told = probe.told([Row(f"{number}", 1, 0, (7,))], [0], torch.ones(1, size))
        assert told[0].remaining
    assert list(probe._kept) == ["6", "7", "8"]
    assert len(probe._means) == 8  # rows of those that were forgotten are used again
    again = probe.told([Row("0", 1, EVERY - 1, (7,))], [0], torch.ones(1, size))  # forgotten, and read nevertheless
    assert again[0].remaining


def test_nothing_is_kept_of_requests_that_went_away(tiny: Tiny, head: LengthHead) -> None:
    probe = LengthProbe(head, CPU)
    driver = driven(tiny, probe)
    driver.step([Run(name, 0, 64) for name in driver.live])
    assert probe._kept
    for name in driver.live:
        driver.engine.forget(name)
    assert not probe._kept


def test_a_step_takes_as_many_operations_however_many_requests_run(head: LengthHead) -> None:
    """Each is a launch on a GPU."""
    counts = []
    for number in (2, 5):
        probe, size = LengthProbe(head, CPU), head.config.hidden_size
        for start, tokens in ((0, (7,)), (1, (7, 7)), (3, (7, 7, 7, 7, 7))):  # the last one is due
            rows = [Row(f"{n}", 1, start, tokens) for n in range(number)]
            begins = [n * len(tokens) for n in range(number)]
            with Counted() as counted:
                told = probe.told(rows, begins, torch.ones(number * len(tokens), size))
            counts.append(counted.operations)
            assert all((row.remaining is None) == (start == 1) for row in told)
    assert counts[:3] == counts[3:]


class Counted(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_states_that_are_no_numbers_spoil_no_later_request(head: LengthHead) -> None:
    probe, size = LengthProbe(head, CPU), head.config.hidden_size
    probe.told([Row("a", 1, 0, (7,))], [0], torch.full((1, size), float("nan")))
    probe.told([Row("a", 1, 1, (7,), finish=Finish.STOP)], [0], torch.ones(1, size))
    probe.told([Row("b", 1, 0, (7,))], [0], torch.ones(1, size))
    assert torch.equal(probe._means[probe._kept["b"][0]], torch.ones(size))


def test_a_prefill_that_does_not_end_is_not_read(tiny: Tiny, head: LengthHead) -> None:
    driver = driven(tiny, LengthProbe(head, CPU))
    assert [row.remaining for row in driver.step([Run("2", 0, 2)])] == [None]


def test_of_several_rounds_in_a_row_the_newest_reading_is_sent() -> None:
    rows = [
        Row("a", 1, 0, (5,), remaining=Remaining(1, b"1" * BINS)),
        Row("a", 1, 1, (5, 5), remaining=Remaining(3, b"2" * BINS)),
        Row("a", 1, 3, (5,)),
    ]
    (row,) = of_report(Report(1, 1, 1, [rows]), 1, "s").rows
    assert (row.remaining.after, row.remaining.chances) == (3, b"2" * BINS)
    (row,) = of_report(Report(1, 1, 1, [rows[2:]]), 1, "s").rows
    assert not row.HasField("remaining")


# ---- files ----


def target(fingerprint: str = "a fingerprint", name: str = "tiny", size: int = 64) -> Any:
    model = SimpleNamespace(config=PretrainedConfig(hidden_size=size))
    return SimpleNamespace(name=name, fingerprint=fingerprint, device=CPU, model=model)


def test_others_may_read_a_saved_probe(head: LengthHead, tmp_path: Path) -> None:
    """A worker in a container, say, which is another user."""
    save_length_head(head, tmp_path)
    assert {file.stat().st_mode & 0o444 for file in tmp_path.iterdir()} == {0o444}


def test_a_saved_probe_reads_the_same(head: LengthHead, tmp_path: Path) -> None:
    save_length_head(head, tmp_path)
    hidden = torch.randn(5, head.config.hidden_size)
    first = torch.tensor([True, False, True, False, False])
    again = load_length_head(tmp_path)
    assert torch.allclose(middle(again(hidden, hidden, first)), middle(head(hidden, hidden, first)), atol=1e-2)
    assert make_probe(str(tmp_path), target()) is not None


def test_a_probe_of_another_model_is_refused(head: LengthHead, tmp_path: Path) -> None:
    save_length_head(head, tmp_path)
    with pytest.raises(ModelError, match="made for tiny"):
        make_probe(str(tmp_path), target("other weights"))


def test_a_probe_of_states_of_another_size_is_refused(head: LengthHead, tmp_path: Path) -> None:
    save_length_head(head, tmp_path)
    with pytest.raises(ModelError, match=r"64 numbers, those of tiny have 32"):
        make_probe(str(tmp_path), target(size=32))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / length_head.CONFIG).write_text("{"),
        lambda folder: (folder / length_head.CONFIG).write_text('{"version": 1}'),
        lambda folder: (folder / length_head.WEIGHTS).write_bytes(b"nothing"),
        lambda folder: (folder / length_head.WEIGHTS).unlink(),
        lambda folder: change(folder, '"version": 1', '"version": 2'),
        lambda folder: change(folder, f'"every": {EVERY}', '"every": 0'),
    ],
)
def test_a_damaged_probe_is_refused_in_words(damage: Any, head: LengthHead, tmp_path: Path) -> None:
    save_length_head(head, tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match="probe"):
        make_probe(str(tmp_path), target())


def change(folder: Path, old: str, new: str) -> None:
    file = folder / length_head.CONFIG
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_weight_that_is_not_finite_is_refused(head: LengthHead, tmp_path: Path) -> None:
    head.first.weight.data[0, 0] = float("nan")
    save_length_head(head, tmp_path)
    with pytest.raises(ModelError, match="not finite"):
        make_probe(str(tmp_path), target())


def test_by_default_a_model_without_a_probe_has_none() -> None:
    assert make_probe("default", target()) is None
    assert make_probe("none", target()) is None


def test_the_probes_that_come_with_laps_sd_can_be_read() -> None:
    folders = [file.parent for file in Path(length_head.__file__).parent.glob(f"length_heads/*/{length_head.CONFIG}")]
    assert folders
    for folder in folders:
        config = load_length_head(folder).config
        assert config.target == folder.name
        assert make_probe("default", target(config.fingerprint, folder.name, config.hidden_size)) is not None
        assert make_probe("default", target("other weights", folder.name)) is None
        assert (folder / length_head.WEIGHTS).stat().st_size < 200_000
