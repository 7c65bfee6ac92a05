"""Other people's clients, unmodified, each in an environment of its own, on a live stack with the real model."""

import pytest

from tests.doors.conftest import Run

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(1200)]


async def test_openai_2(run: Run) -> None:
    await run("openai_client.py", "openai>=2.54,<3")


async def test_openai_3(run: Run) -> None:
    await run("openai_client.py", "openai>=3.54,<4")


async def test_litellm(run: Run) -> None:
    await run("litellm_client.py", "litellm==1.106.*")


async def test_langchain(run: Run) -> None:
    await run("langchain_client.py", "langchain-openai==1.7.*")


async def test_pydantic_ai(run: Run) -> None:
    await run("pydantic_ai_client.py", "pydantic-ai-slim[openai]==2.68.*")


async def test_openai_agents(run: Run) -> None:
    await run("agents_client.py", "openai-agents==0.24.*")
