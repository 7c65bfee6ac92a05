"""The drafter as a process: what it tells of itself, what SIGTERM does, and how a model that cannot be used ends it."""

import asyncio
import json
import signal
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from transformers import AutoTokenizer

from laps_sd.ports import claim_ports
from protos.health import is_serving
from tests.tiny_model import make_tiny_model
from tests.worker.drafting.live_drafter import Peer
from worker_service.drafters import vocabulary_digest
from worker_service.drafting.service import SERVICE

DEADLINE_S = 200.0  # to load torch and, once, to compile the kernels takes minutes on a busy machine


async def test_it_drafts_tells_its_figures_and_ends_at_sigterm_without_a_word_of_the_text(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "small")
    port, health, metrics = claim_ports(0, 0, 0)
    command = [sys.executable, "-m", "worker_service.drafting", "--model", str(folder), "--port", str(port)]
    command += ["--health-port", str(health), "--metrics-port", str(metrics), "--device", "cpu", "--dtype", "float32"]
    command += ["--threads", "1", "--kv-tokens", "1024", "--log-level", "debug"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            said = [await process.stderr.readline()]
            while json.loads(said[-1])["event"] != "ready":
                said.append(await process.stderr.readline())
            assert await asyncio.to_thread(is_serving, f"127.0.0.1:{health}", SERVICE)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            text = list(tokenizer("Nobody reads this").input_ids)
            peer = await Peer(f"127.0.0.1:{port}", vocabulary_digest(tokenizer)).attach()
            await peer.say({"handle": 1, "tokens": text, "need": 2, "ahead": 4})
            chain = await peer.chain(1, len(text), 4)
            page = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{metrics}/metrics")
            read = page.read().decode()
            assert 'laps_sd_drafter_guesses_total{model_name="small"} 4.0' in read
            assert 'laps_sd_drafter_sessions{model_name="small"} 1.0' in read
            process.send_signal(signal.SIGTERM)
            ended = await peer.ended()
            assert (ended.code(), ended.details()) == (grpc.StatusCode.UNAVAILABLE, "this drafter is ending")
            _, rest = await process.communicate()
            await peer.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    log = b"".join(said) + rest
    assert process.returncode == 0, log.decode()
    assert b"Nobody reads" not in log
    assert not any(str(tokens).encode() in log for tokens in (text, chain))


@pytest.mark.parametrize("wrong", [["--model", "/no/such/model"], ["--model", "m", "--port", "-1"], []])
async def test_what_cannot_be_used_is_one_sentence_and_2(wrong: list[str]) -> None:
    command = [sys.executable, "-m", "worker_service.drafting", *(wrong or ["--port", "0"])]
    if "--port" not in command:
        command += ["--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        _, said = await process.communicate()
    assert process.returncode == 2
    lines = said.decode().splitlines()
    assert lines[-1].startswith("drafter")
    assert "Traceback" not in said.decode()
