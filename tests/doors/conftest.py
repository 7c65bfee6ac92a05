"""One live stack on the real model for all of these tests, and the programs of other people's clients."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.doors.environments import python_with
from tests.e2e.stack import Stack, running_stack

MODEL = "smollm2-135m"
CLIENTS = Path(__file__).parent / "clients"
CLIENT_S = 600
Run = Callable[..., Awaitable[None]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(MODEL, tmp_path_factory.mktemp("stack"), "--slots", "4") as running:
        yield running


@pytest.fixture
def run(stack: Stack) -> Run:
    """Runs a program of `clients/` against the stack, in an environment with these requirements. It ends with 0 if all
    that it asserts is so."""

    async def run(program: str, *requirements: str) -> None:
        python = await asyncio.to_thread(python_with, *requirements)
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        process = await asyncio.create_subprocess_exec(
            python,
            str(CLIENTS / program),
            f"http://{stack.http}/v1",
            MODEL,
            env=environment | {"OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), CLIENT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()[-4000:]

    return run
