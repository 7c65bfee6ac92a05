"""`laps-sd generate` as a person runs it: a process, its stdout, its exit status."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from laps_sd.cli import app
from laps_sd.client import BadInput, Lost, RequestError
from laps_sd.interrupt import INTERRUPTED
from protos.v1 import types_pb2
from tests.client.scripted import Gateway, chunk, serving
from tests.gateway.harness import WAIT_S, ending, ids, stack


async def generate(server: str, *arguments: str, command: Sequence[str] = ("generate", "the fox")) -> Process:
    words = [sys.executable, "-m", "laps_sd.cli", *command, "--server", server, *arguments]
    return await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def output(process: Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S * 2)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_json_is_one_object_with_the_promised_keys() -> None:
    async with stack() as (_, link, client):
        options = ["--json", "--raw", "--max-tokens", "9", "--seed", "7", "--stop", ".", "--class", "batch"]
        process = await generate(client.target, *options)
        submit = await link.accept()
        assert (submit.limits.max_tokens, submit.sampling.seed, list(submit.limits.stop)) == (9, 7, ["."])
        assert submit.priority == types_pb2.PRIORITY_BATCH
        await link.delta(submit, 0, ids("end"))
        await link.delta(submit, len(ids("end")), [40], drafted=4, accepted=0, ending=ending(preemptions=1))
        code, out, _ = await output(process)
    answer = json.loads(out)
    timings = answer.pop("timings_ms")
    assert code == 0
    assert answer == {
        "request_id": submit.request_id,
        "text": answer["text"],
        "token_ids": [*ids("end"), 40],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": len(submit.prompt), "completion_tokens": len(ids("end")) + 1},
        "spec_decode": {
            "num_drafts": 1,
            "num_draft_tokens": 4,
            "num_accepted_tokens": 0,
            "accepted_per_round": [0],
        },
        "preemptions": 1,
    }
    assert answer["text"].startswith("end")
    assert timings.keys() == {"queue", "ttft", "e2el"}
    assert 0 < timings["ttft"] <= timings["e2el"]


async def test_text_is_printed_as_it_comes_and_stats_go_to_stderr() -> None:
    async with stack() as (_, link, client):
        process = await generate(client.target, "--stats", "--system", "be brief")
        submit = await link.accept()
        assert list(submit.prompt) == ids("<bos>system: be brief\n<bos>user: the fox\nassistant: ")
        await link.delta(submit, 0, ids("jumps"))
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.read(5), WAIT_S) == b"jumps"
        await link.delta(submit, len(ids("jumps")), ending=ending())
        code, out, err = await output(process)
        assert (code, out) == (0, "\n")
        assert "finish reason" in err


async def test_a_request_that_somebody_cancelled_is_told_so_and_exit_1() -> None:
    async with stack() as (_, link, client):
        process = await generate(client.target)
        submit = await link.accept()
        await link.delta(submit, 0, ids("jumps"))
        await link.delta(submit, len(ids("jumps")), ending=ending(types_pb2.FINISH_REASON_CANCELLED))
        code, out, err = await output(process)
    assert (code, out) == (1, "jumps\n")
    assert err == "laps-sd: somebody cancelled the request before its answer was whole\n"


async def test_an_error_is_one_line_and_exit_1() -> None:
    async with stack() as (_, _, client):
        code, out, err = await output(await generate(client.target, "--temperature", "3"))
    assert (code, out) == (1, "")
    assert err == "laps-sd: INVALID_ARGUMENT: temperature: must be in [0, 2], not 3\n"


@pytest.mark.parametrize("bad", [("--max-tokens", "5000000000"), ("--stop", "\udcff")], ids=["too big", "no UTF-8"])
async def test_what_the_wire_cannot_carry_is_one_line_and_exit_1(bad: tuple[str, str]) -> None:
    code, out, err = await output(await generate("127.0.0.1:1", *bad))
    assert (code, out) == (1, "")
    assert err.startswith(f"laps-sd: INVALID_ARGUMENT: {bad[0][2:].replace('-', '_')}: ")
    assert err.count("\n") == 1


async def test_the_prompt_may_come_from_stdin() -> None:
    async with stack() as (_, link, client):
        process = await generate(client.target, "--raw", command=("generate", "-"))
        assert process.stdin is not None
        process.stdin.write(b"the fox")
        process.stdin.close()
        submit = await link.accept()
        assert list(submit.prompt) == ids("<bos>the fox")
        await link.delta(submit, 0, [40], ending=ending())
        assert (await output(process))[0] == 0


async def test_log_probabilities_that_nobody_would_see_are_refused() -> None:
    code, _, err = await output(await generate("127.0.0.1:1", "--logprobs", "2"))
    assert (code, "--json" in err) == (2, True)


async def test_a_model_without_chat_template_brings_a_hint() -> None:
    async with stack(template="") as (_, _, client):
        code, _, err = await output(await generate(client.target))
    assert code == 1
    assert "no chat template" in err
    assert "--raw" in err


async def test_bad_usage_is_exit_2() -> None:
    code, _, err = await output(await generate("127.0.0.1:1", "--raw", "--system", "x"))
    assert code == 2
    assert "raw" in err


async def test_ctrl_c_cancels_the_request_and_exits_130() -> None:
    async with stack() as (_, link, client):
        process = await generate(client.target)
        submit = await link.accept()
        process.send_signal(signal.SIGINT)
        assert (await link.next("cancel")).request_id == submit.request_id
        assert (await output(process))[0] == 130


@pytest.mark.parametrize(("error", "told"), [(Lost("a gap"), True), (BadInput("prompt", "too long"), False)])
def test_how_to_resume_is_told_if_a_detached_request_may_run_on(error: RequestError, told: bool) -> None:
    with serving(Gateway([error])) as gateway:
        words = ["generate", "x", "--raw", "--detach", "--request-id", "mine", "--server", gateway.target]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert ("laps-sd resume mine" in result.stderr) is told


@pytest.mark.parametrize("come", [0, 1])
def test_an_answer_of_which_a_part_came_was_broken_off(come: int) -> None:
    with serving(Gateway([*[chunk(0, [5], "words")] * come, BadInput("prompt", "too long")])) as gateway:
        result = CliRunner().invoke(app, ["generate", "x", "--raw", "--server", gateway.target])
    assert result.exit_code == 1
    assert result.stderr.startswith("laps-sd: the answer was broken off: INVALID" if come else "laps-sd: INVALID")


def test_nothing_runs_on_that_was_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("laps_sd.answer.listens", interrupted)
    result = CliRunner().invoke(app, ["generate", "x", "--detach"])
    assert (result.exit_code, result.stderr) == (INTERRUPTED, "")
