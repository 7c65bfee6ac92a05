"""`laps-sd up --drafters 1`, the whole of it: what a drafter in a process of its own guesses is used, and changes no
token, whether it lives or dies."""

import asyncio
import json
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from laps_sd.client import AsyncClient
from tests.chaos.book import Book
from tests.e2e.stack import running_stack
from tests.waiting import until
from worker_service.engine.types import Sampling

# A tiny model's pass ends before any message gets anywhere: its worker is as slow as one of a use.
PACE = {"draft_s": 0.0, "verify_s": 0.02, "verify_slope_s": 0.001, "prefill_token_s": 0.0001, "verify_token_s": 0.0005}
USED_S = 120.0


def addresses(targets: Path) -> list[str]:
    """Of the workers' metrics."""
    groups = json.loads(targets.read_text())
    return [address for group in groups if group["labels"]["service"] == "worker" for address in group["targets"]]


async def remote(targets: Path) -> float:
    """Drafts of another process that were verified."""
    total = 0.0
    async with httpx2.AsyncClient(timeout=10.0) as http:
        for address in addresses(targets):
            answer = await http.get(f"http://{address}/metrics")
            total += sum(
                sample.value
                for family in text_string_to_metric_families(answer.text)
                for sample in family.samples
                if sample.name == "laps_sd_spec_decode_num_remote_draft_tokens_total"
            )
    return total


async def test_a_drafter_apart_is_used_and_used_again_after_its_death_and_changes_no_token(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPS_SD_WORKER_PACE", json.dumps(PACE))
    book = Book(tiny_model, tokens=60, prompts=3, samplings=(Sampling(), Sampling(temperature=1.5, seed=7)))
    targets = tmp_path / "targets.json"
    flags = ("--drafters", "1", "--drafter-model", str(tiny_model), "--metrics-targets", str(targets))
    async with running_stack(tiny_model, tmp_path, *flags) as stack, AsyncClient(stack.grpc) as client:

        async def right() -> None:
            asked = [client.complete(**text.params(), max_tokens=len(text.tokens)) for text in book.texts]
            answers = await asyncio.gather(*asked)
            assert [tuple(answer.token_ids) for answer in answers] == [text.tokens for text in book.texts]

        async def used_anew() -> None:
            before = await remote(targets)

            async def more() -> bool:
                await right()
                return await remote(targets) > before

            await until(more, USED_S)

        await used_anew()
        stack.child("worker_service.drafting").kill()
        await right()
        await used_anew()
        assert await stack.stop() == 0
