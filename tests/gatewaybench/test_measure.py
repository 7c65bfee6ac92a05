"""The bench of the gateway, small: a real gateway process, the stub of a scheduler and clients that count."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laps_sd.cli import app
from laps_sd.gatewaybench.command import FIGURES, told
from laps_sd.gatewaybench.load import Reader, straight
from laps_sd.gatewaybench.measure import Load, gateway_of_stub, measure, percentiles_of
from laps_sd.ports import HOST, claim_ports
from laps_sd.supervise import leashed
from protos.serving import address
from tests.gateway.harness import TOKENIZER


async def test_every_figure_is_measured_and_every_answer_comes_whole(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    load = Load(streams=50, rounds_per_s=50, tokens_per_round=2, many=5, many_s=2, seconds=0.5)
    figures = await measure(load, tmp_path)
    added_ms = figures["ttft_p50_ms"] - figures["straight_ttft_p50_ms"]
    assert figures["straight_ttft_p50_ms"] > 0
    assert figures["added_ttft_p50_ms"] == pytest.approx(added_ms)
    assert figures["chunks_per_cpu_s"] > 0
    assert len(list(told(figures))) == len(FIGURES)
    assert figures["probes"] > 1
    assert (figures["open_at_once"], figures["whole"], figures["problems"]) == (5, 5, 0)


async def test_a_stream_that_ends_too_soon_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    load = Load(streams=3, rounds_per_s=10, tokens_per_round=1, many=1, many_s=1, seconds=0.5)
    monkeypatch.setattr("laps_sd.gatewaybench.measure.ENDLESS", 4)
    assert (await measure(load, tmp_path))["problems"] == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--seconds", "100"], "a stream would need 8,040 tokens"),
        (["--model", "nowhere"], "unknown model 'nowhere'"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(flags: list[str], says: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "gateway", *flags])
    assert result.exit_code in (1, 2)
    assert says in result.output


async def test_a_scheduler_that_cannot_be_asked_is_told_as_no_connection() -> None:
    (port,) = claim_ports(0)
    async with straight(address(HOST, port)) as ask:
        with pytest.raises(ConnectionError, match="hung up"):
            await ask()


async def test_events_are_counted_wherever_they_are_cut() -> None:
    reader = Reader(1)
    reader.connection_made(asyncio.Transport())
    said = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a":1}\n\ndata: {"b":2}\n\n'
    for i in range(len(said)):
        reader.data_received(said[i : i + 1])
    assert reader.events == 2


def test_no_percentile_is_beyond_what_was_measured() -> None:
    assert percentiles_of([1.0, 2.0])[98] <= 2.0


async def test_the_stub_ends_with_the_bench_however_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def begin(*words: str, **_: object) -> None:
        begun.extend(words)
        raise ConnectionError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    with pytest.raises(ConnectionError):
        async with gateway_of_stub(1.0, 1, 1, tmp_path):
            pass
    assert begun[: len(leashed([]))] == leashed([])
