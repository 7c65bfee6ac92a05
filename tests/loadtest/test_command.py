"""`laps-sd loadtest` as a person types it, against the real gateway and a scheduler that answers at once."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laps_sd.cli import app
from laps_sd.loadtest.command import FELL_BEHIND
from protos.link.v1 import gateway_link_pb2
from protos.v1 import types_pb2
from tests.gateway.harness import Link, ending, stack

RUN_S = 60.0


@asynccontextmanager
async def answering_stack(**settings: Any) -> AsyncIterator[tuple[str, list[gateway_link_pb2.Submit]]]:
    """Where it serves, and what was submitted. Each answer has one round of a token, then one of all the others."""
    submitted: list[gateway_link_pb2.Submit] = []

    async def answer(link: Link) -> None:
        while True:
            message = await link.received.get()
            if not message.HasField("submit"):
                continue
            submit, more = message.submit, message.submit.limits.max_tokens - 1
            submitted.append(submit)
            await link.send(accepted=[submit.request_id])
            if not more:
                await link.delta(submit, 0, [40], ending=ending(types_pb2.FINISH_REASON_LENGTH))
                continue
            await link.delta(submit, 0, [40])
            last = ending(types_pb2.FINISH_REASON_LENGTH, preemptions=1)
            await link.delta(submit, 1, [40] * more, drafted=4, accepted=more - 1, ending=last)

    async with stack(context_tokens=256, **settings) as (_, link, client):
        answering = asyncio.create_task(answer(link))
        try:
            yield client.target, submitted
        finally:
            answering.cancel()


async def loadtest(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "laps_sd.cli", "loadtest", *words]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=RUN_S)
    return ran.returncode, ran.stdout, ran.stderr


def workload(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "work.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_a_workload_is_replayed_and_written_down(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.0, "prompt": "the fox", "output_tokens": 4, "predicted_output_tokens": 3, "class": "batch"},
        {"arrival_s": 0.1, "prompt_tokens": 30, "output_tokens": 2},
        {"arrival_s": 0.1, "prompt_tokens": 900, "output_tokens": 20},
    ]
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    async with answering_stack() as (server, submitted):
        words = ["--workload", workload(tmp_path, *rows), "--context-tokens", "60", "--slo", "e2el:60000", "--detail"]
        code, out, err = await loadtest("--server", server, *words, "--json", str(data), "--html", str(page))
    assert code in (0, FELL_BEHIND), err
    results = json.loads(data.read_text())
    assert (results["completed"], results["failed"], results["clipped"]) == (3, 0, 1)
    assert results["total_output_tokens"] == 4 + 2 + 20
    assert results["spec_decode_num_drafts"] == 3
    assert results["preemptions_per_request"] == 1
    assert 0 < results["mean_ttft_ms"] <= results["mean_e2el_ms"]
    assert results["request_goodput"] == results["request_throughput"]
    assert [len(request["rounds"]) for request in results["requests"]] == [2, 2, 2]
    assert results["timeline"][0]["waiting"] == 3
    assert page.read_text().count("<svg") >= 2
    assert "time to first token" in out
    # The two that are due at once may come in any order.
    hinted, *synthetic = sorted(submitted[-3:], key=lambda submit: len(submit.prompt))
    assert (hinted.predicted_tokens, hinted.priority) == (3, types_pb2.PRIORITY_BATCH)
    assert [submit.limits.ignore_eos for submit in submitted[-3:]] == [True, True, True]
    assert [len(submit.prompt) for submit in synthetic] == pytest.approx([30, 40], abs=8)  # of words of four tokens


async def test_without_a_workload_prompts_of_three_kinds_are_sent_with_short_and_long_bounds(tmp_path: Path) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    async with answering_stack() as (server, submitted):
        words = ["--rate", "inf", "--requests", "24", "--detail", "--json", str(data), "--html", str(page)]
        code, out, err = await loadtest("--server", server, *words)
    assert code in (0, FELL_BEHIND), err
    results = json.loads(data.read_text(), parse_constant=pytest.fail)  # it would be no JSON
    assert results["settings"]["rate"] == "inf"
    assert {request["category"] for request in results["requests"]} == {"chat", "code", "reasoning"}
    assert len({submit.limits.max_tokens for submit in submitted}) >= 4
    assert not any(submit.limits.ignore_eos for submit in submitted)
    assert results["served_by"] == {"at": server, "model": "tiny", "policy": "laps-sd"}
    assert out.startswith(f"tiny under laps-sd, served at {server}; 24 requests")
    for fact in ("<dt>model</dt><dd>tiny</dd>", "<dt>policy</dt><dd>laps-sd</dd>", "<dt>machine</dt>", "<dt>date</dt>"):
        assert fact in page.read_text()


async def test_several_drivers_share_the_requests(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    async with answering_stack() as (server, submitted):
        words = ["--rate", "200", "--requests", "21", "--prompt-tokens", "20", "--max-tokens", "2", "--drivers", "2"]
        code, _, err = await loadtest("--server", server, *words, "--detail", "--json", str(data))
    assert code in (0, FELL_BEHIND), err
    results = json.loads(data.read_text())
    assert results["completed"] == 21
    assert [request["index"] for request in results["requests"]] == list(range(21))
    assert len({tuple(submit.prompt) for submit in submitted[-21:]}) == 21


async def test_texts_without_arrivals_go_round_a_closed_loop(tmp_path: Path) -> None:
    texts = workload(tmp_path, {"prompt": "the fox"}, {"prompt": "the dog"})
    async with answering_stack() as (server, submitted):
        words = ["--workload", texts, "--requests", "3", "--concurrency", "1", "--max-tokens", "3"]
        code, out, err = await loadtest("--server", server, *words)
    assert code in (0, FELL_BEHIND), err
    assert [submit.limits.max_tokens for submit in submitted] == [3, 3, 3]
    assert submitted[0].prompt == submitted[2].prompt != submitted[1].prompt
    assert "3, 0" in out


async def test_a_trace_that_is_repeated_keeps_its_order(tmp_path: Path) -> None:
    trace = workload(tmp_path, *({"arrival_s": at, "prompt": "the fox", "output_tokens": at + 2} for at in range(3)))
    async with answering_stack() as (server, submitted):
        words = ["--workload", trace, "--requests", "6", "--rate", "inf", "--concurrency", "1"]
        code, _, err = await loadtest("--server", server, *words)
    assert code in (0, FELL_BEHIND), err
    assert [submit.limits.max_tokens for submit in submitted] == [2, 3, 4, 2, 3, 4]


async def test_a_server_that_is_not_there_is_one_clear_line() -> None:
    code, _, err = await loadtest("--server", "127.0.0.1:1", "--rate", "1", "--timeout-s", "1", "--ready-s", "0.5")
    assert code == 1
    assert err.startswith("laps-sd: UNAVAILABLE: nothing listens at 127.0.0.1:1")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give --workload, --rate or --concurrency"),
        (["--rate", "1", "--slo", "itl:3"], "none of ttft"),
        (["--rate", "1", "--openai", "http://h"], "go together"),
        (["--rate", "1", "--openai", "http://h:x", "--model", "m"], "--openai: 'http://h:x' is no address"),
        (["--rate", "1", "--openai", "http://h", "--model", "m", "--stats-server", "h:1"], "goes with --server"),
        (["--rate", "1", "--length-scale", "inf"], "Invalid value for '--length-scale'"),
        (["--ramp-to", "3", "--concurrency", "1"], "finite --rate"),
        (["--rate", "inf", "--ramp-to", "3"], "finite --rate"),
        (["--concurrency", "2", "--drivers", "3"], "more than requests in flight"),
        (["--workload", "none.jsonl"], "cannot be read"),
        (["--rate", "nan"], "Invalid value for '--rate'"),
        (["--rate", "1", "--requests", "5", "--warmup", "5"], "leaves none of 5 requests"),
        (["--rate", "1", "--json", "/no/such/folder/out.json"], "cannot be written"),
    ],
)
def test_a_wrong_flag_is_a_sentence(words: list[str], complaint: str) -> None:
    ran = CliRunner().invoke(app, ["loadtest", *words], env={"COLUMNS": "200", "TERM": "dumb"})
    assert ran.exit_code == 2
    assert complaint in ran.output


def test_a_file_without_arrivals_needs_a_rate(tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        app, ["loadtest", "--workload", workload(tmp_path, {"prompt": "Hi"})], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert "arrival_s: is missing; or give --rate or --concurrency" in ran.output
