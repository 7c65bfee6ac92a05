"""The whole service on a model that vLLM spreads over several processes: the texts are those of vLLM on one, and no
process outlives its worker."""

import asyncio
import json
import os
from pathlib import Path

import psutil
import pytest

if "LAPS_SD_TESTS_VLLM_PYTHON" not in os.environ:
    pytest.skip("no interpreter with vLLM is named: make test-vllm", allow_module_level=True)

from laps_sd.client import AsyncClient
from tests.e2e.stack import running_stack
from tests.vllm.test_service import MODEL, MODULE, PROMPTS, PYTHON, encoded
from tests.vllm.test_service import undisturbed as undisturbed
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(7200)]


RANKS = 3  # as many as the model has heads of keys and values


async def test_texts_are_the_same_and_no_process_is_left(undisturbed: list[list[int]], tmp_path: Path) -> None:
    args = {"enforce_eager": True, "max_model_len": 1024, "tensor_parallel_size": RANKS}
    flags = ["--engine", "vllm", "--vllm-python", str(PYTHON), "--vllm-args", json.dumps(args), "--kv-tokens", "4096"]
    flags += ["--slots", "2", "--policy", "las"]
    async with running_stack(MODEL, tmp_path, *flags, device=None, ready_s=3000) as stack:
        async with AsyncClient(stack.grpc) as client:
            asked = [
                client.complete(tokens=encoded(prompt), max_tokens=most, temperature=0) for prompt, most in PROMPTS[4:9]
            ]
            answers = await asyncio.gather(*asked)
        assert [answer.token_ids for answer in answers] == undisturbed[4:9]
        worker = stack.child(MODULE)
        ranks = worker.children(recursive=True)
        assert len(ranks) >= RANKS
        worker.kill()

        async def gone() -> bool:
            return not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)

        await until(gone)
        await stack.stop()
