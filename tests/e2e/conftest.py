"""A tiny model, and one stack on it that tests may share as long as they kill nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from laps_sd.client import AsyncClient
from tests.e2e.stack import Stack, running_stack
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context is so long that a request for all of it is still running when a test has done what it does."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context_tokens=32_768)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One worker of one slot: the request that runs keeps the others waiting."""
    async with running_stack(tiny_model, tmp_path_factory.mktemp("stack"), "--slots", "1") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.grpc) as made:
        yield made
