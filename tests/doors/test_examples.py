"""Every program of `examples/`, run as its reader would run it, on a live stack with the real model."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.doors.environments import python_with
from tests.doors.wheels import REPOSITORY
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(1200)]

EXAMPLES = REPOSITORY / "examples"
RUN_S = 300
MOST_LINES = 40
RUN_HERE = {  # with what our own environment has
    "json_schema.py", "resume.py", "batch.py", "own_policy.py", "openai_chat.py", "reflection.py",
    "curl.sh", "load_test.sh",
}  # fmt: skip
ELSEWHERE = {"langchain_chat.py", "triton.py"}


async def run(stack: Stack, folder: Path, *command: str, env: Mapping[str, str] = {}) -> str:
    ours = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    where = {"LAPS_SD_SERVER": stack.grpc, "OPENAI_BASE_URL": f"http://{stack.http}/v1", "OPENAI_API_KEY": "any"}
    environment = {**os.environ, "PATH": ours, "PYTHONPATH": str(REPOSITORY), "NO_PROXY": "*", **where, **env}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=pipe, stderr=pipe, env=environment)
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + err).decode()[-4000:]
    return out.decode()


async def python(stack: Stack, folder: Path, name: str, *arguments: str) -> str:
    return await run(stack, folder, sys.executable, str(EXAMPLES / name), *arguments)


async def test_every_example_is_short_and_has_a_test() -> None:
    programs = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".sh")}
    assert programs == RUN_HERE | ELSEWHERE
    lengths = {name: len((EXAMPLES / name).read_text().splitlines()) for name in programs}
    assert max(lengths.values()) <= MOST_LINES, lengths
    table = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in table for name in programs)


async def test_json_schema(stack: Stack, tmp_path: Path) -> None:
    lines = (await python(stack, tmp_path, "json_schema.py")).splitlines()
    assert lines[-1] in (" true", " false")


async def test_resume(stack: Stack, tmp_path: Path) -> None:
    assert "left request" in await python(stack, tmp_path, "resume.py")


async def test_a_batch_that_is_started_again_gets_the_same_answers(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Why is the sky blue?\nName a fruit.\nWhat is two and two?\n")
    first, again = [await python(stack, tmp_path, "batch.py", "prompts", "mine") for _ in range(2)]
    answers = [sorted(map(json.loads, said.splitlines()), key=lambda row: row["number"]) for said in (first, again)]
    assert [row["number"] for row in answers[0]] == [0, 1, 2]
    assert all(row["text"] for row in answers[0])
    assert answers[0] == answers[1]


async def test_a_policy_of_ones_own(stack: Stack, tmp_path: Path) -> None:
    assert "own_policy.ShortPrompts" in await python(stack, tmp_path, "own_policy.py")


async def test_openai(stack: Stack, tmp_path: Path) -> None:
    assert "completion_tokens=" in await python(stack, tmp_path, "openai_chat.py")


async def test_reflection(stack: Stack, tmp_path: Path) -> None:
    said = await python(stack, tmp_path, "reflection.py")
    assert "Generate(GenerateRequest) -> GenerateResponse" in said
    assert "FINISH_REASON_LENGTH" in said


async def test_curl(stack: Stack, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    said = await run(stack, tmp_path, "sh", str(EXAMPLES / "curl.sh"))
    assert "data: [DONE]" in said
    assert '"finished"' in said.splitlines()[-1]


async def test_load_test(stack: Stack, tmp_path: Path) -> None:
    await run(stack, tmp_path, "sh", str(EXAMPLES / "load_test.sh"), "report.html")
    assert json.loads((tmp_path / "report.json").read_text())["completed"] == 20


async def test_langchain(stack: Stack, tmp_path: Path) -> None:
    interpreter = await asyncio.to_thread(python_with, "langchain-openai==1.7.*")
    assert await run(stack, tmp_path, interpreter, str(EXAMPLES / "langchain_chat.py"), env={"PYTHONPATH": ""})


async def test_tritonclient(stack: Stack, tmp_path: Path) -> None:
    bounds = [f"grpcio-{part}<1.82" for part in ("health-checking", "reflection", "status")]
    interpreter = await asyncio.to_thread(python_with, "tritonclient[grpc]>=2.70", "protobuf<7", *bounds)
    said = await run(stack, tmp_path, interpreter, str(EXAMPLES / "triton.py"), env={"PYTHONPATH": ""})
    answers = said.removeprefix("1, 2, 3, 4,")  # before the first alone: a stream never repeats its input
    whole = answers[: len(answers) // 2]
    assert whole.strip()
    assert answers == whole * 2
