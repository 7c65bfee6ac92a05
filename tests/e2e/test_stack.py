"""What a client sees of the whole stack: real processes, real Redis, a tiny model on one worker of one slot."""

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transformers import AutoModelForCausalLM, AutoTokenizer

from laps_sd.client import AsyncClient, Collector
from laps_sd.loadtest.command import FELL_BEHIND
from laps_sd.top import frames
from protos.errors import BeyondEnd, DeadlinePassed, UnknownRequest
from tests.e2e.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Once upon a time there was a queue."
MEDIUM = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
SHORT = {"prompt": "A short request", "max_tokens": 5, "ignore_eos": True}
# Minutes of work: whatever machine this is, it does not end while a test looks at it. The test ends it.
ENDLESS = {"prompt": PROMPT, "max_tokens": 30_000, "ignore_eos": True}


async def test_a_short_request_overtakes_a_long_one(client: AsyncClient) -> None:
    long = client.generate(**ENDLESS)
    request_id = (await anext(long)).request_id
    short = await client.complete(**SHORT)
    assert len(short.token_ids) == 5
    assert (await client.status(request_id)).state != "finished"
    await client.cancel(request_id)
    *_, last = [chunk async for chunk in long]
    assert last.final.preemptions >= 1


async def test_the_first_chunk_comes_while_the_request_runs(client: AsyncClient) -> None:
    stream = client.generate(**ENDLESS)
    first = await anext(stream)
    assert first.offset == 0
    assert (await client.status(first.request_id)).state == "running"
    await stream.aclose()


async def test_offsets_and_rounds_account_for_every_token(client: AsyncClient) -> None:
    tokens = rounds = 0
    async for chunk in client.generate(**MEDIUM):
        assert chunk.offset == tokens
        tokens += len(chunk.token_ids)
        rounds += sum(round.tokens for round in chunk.rounds)
        assert all(round.accepted <= round.drafted for round in chunk.rounds)
    assert tokens == rounds == 60


async def test_log_probabilities_and_penalties_come_through_and_again_when_resumed(
    client: AsyncClient, tiny_model: Path
) -> None:
    asked = {**MEDIUM, "max_tokens": 40, "repetition_penalty": 1.3, "logprobs": 2}
    answer = await client.complete(**asked)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(tiny_model)(PROMPT).input_ids
    ids = torch.tensor([prompt])
    generated = model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, repetition_penalty=1.3)
    assert answer.token_ids == generated[0, len(prompt) :].tolist()
    logprobs = model(generated).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, generated[0, len(prompt) :, None])[:, 0].tolist()
    assert answer.logprobs is not None
    assert [own.logprob for own in answer.logprobs] == pytest.approx(expected, abs=1e-3)
    assert all(len(own.top) == 2 for own in answer.logprobs)
    again = Collector()
    async for chunk in client.resume(answer.request_id, 7):
        again.add(chunk)
    assert again.logprobs == answer.logprobs[7:]


async def test_a_prompt_is_scored_and_embedded_exactly_and_again_when_resumed(
    client: AsyncClient, tiny_model: Path
) -> None:
    answer = await client.complete(PROMPT, max_tokens=0, prompt_logprobs=2, embedding=True)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "length")
    assert answer.usage.completion_tokens == 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(tiny_model)(PROMPT).input_ids
    assert answer.prompt_token_ids == prompt
    output = model(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert answer.prompt_logprobs is not None
    assert [own.logprob for own in answer.prompt_logprobs] == pytest.approx(expected, abs=1e-3)
    last = output.hidden_states[-1][0, -1]
    assert answer.embedding == pytest.approx((last / last.norm()).tolist(), abs=1e-4)
    again = Collector()
    async for chunk in client.resume(answer.request_id):
        again.add(chunk)
    assert again.completion().prompt_logprobs == answer.prompt_logprobs
    with pytest.raises(BeyondEnd):
        [chunk async for chunk in client.resume(answer.request_id, 1)]
    # With output the first chunk tells of the prompt, and a stream that goes on behind it does not.
    longer = await client.complete(**SHORT, prompt_logprobs=0)
    assert longer.prompt_logprobs is not None
    told = [chunk.prompt_logprobs async for chunk in client.resume(longer.request_id, 1)]
    assert not any(told)


async def test_cancel_ends_the_stream_with_that_reason(client: AsyncClient) -> None:
    stream = client.generate(**ENDLESS)
    first = await anext(stream)
    await client.cancel(first.request_id)
    *_, last = [chunk async for chunk in stream]
    assert last.final.finish_reason == "cancelled"
    assert (await client.status(first.request_id)).state == "finished"


async def test_a_client_that_hangs_up_ends_its_request(client: AsyncClient) -> None:
    stream = client.generate(**ENDLESS)
    first = await anext(stream)
    await stream.aclose()
    await until_finished(client, first.request_id)
    status = await client.status(first.request_id)
    assert status.finish_reason == "cancelled"


async def test_a_detached_request_runs_on_without_its_client(client: AsyncClient) -> None:
    stream = client.generate(**{**MEDIUM, "max_tokens": 200}, on_disconnect="detach")
    first = await anext(stream)
    await stream.aclose()
    await until_finished(client, first.request_id)
    status = await client.status(first.request_id)
    assert (status.finish_reason, status.output_tokens) == ("length", 200)


async def test_why_am_i_waiting(client: AsyncClient) -> None:
    stream = client.generate(**ENDLESS)
    first = await anext(stream)
    status = await client.status(first.request_id)
    assert (status.state, status.position, status.worker_id) == ("running", 0, "worker-0")
    assert 1 <= status.queue_level <= 6
    assert status.estimated_start_time is not None
    assert status.estimated_end_time is not None
    assert status.estimated_end_time > status.estimated_start_time
    await stream.aclose()


async def test_an_unknown_request_is_not_found(client: AsyncClient) -> None:
    for ask in (client.status, client.cancel):
        with pytest.raises(UnknownRequest):
            await ask("nobody")


async def test_a_seed_gives_the_same_text_again(client: AsyncClient) -> None:
    sampled = {**MEDIUM, "temperature": 1.0, "seed": 11}
    first, second = await client.complete(**sampled), await client.complete(**sampled)
    other = await client.complete(**{**sampled, "seed": 12})
    assert first.token_ids == second.token_ids != other.token_ids


async def test_a_stop_string_ends_the_text_before_it(client: AsyncClient) -> None:
    whole = await client.complete(**MEDIUM)
    stop = whole.text[20:23]
    cut = await client.complete(**MEDIUM, stop=[stop])
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


async def test_a_deadline_is_never_disguised_as_length(client: AsyncClient) -> None:
    with pytest.raises(DeadlinePassed):
        await client.complete(**ENDLESS, timeout_s=0.2)


async def test_stats_tell_of_the_worker_and_the_delays(client: AsyncClient) -> None:
    await client.complete(**SHORT)
    stats = await client.stats()
    assert (stats.policy, len(stats.workers), stats.workers[0].slots) == ("gittins", 1, 1)
    assert timedelta(0) < stats.report_to_command_p50 <= stats.report_to_command_p99
    assert stats.num_accepted_tokens <= stats.num_draft_tokens


async def test_reflection_lists_the_public_service(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=10)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    assert "laps_sd.v1.Inference" in [service.name for service in answer.list_services_response.service]


async def test_the_command_line_prints_the_documented_object(stack: Stack) -> None:
    command = ["generate", "Hello there", "--server", stack.grpc, "--max-tokens", "8", "--ignore-eos", "--json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laps_sd", *command, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    answer = json.loads(out)
    assert process.returncode == 0
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 8
    assert answer["finish_reason"] == "length"
    assert sum(answer["spec_decode"]["accepted_per_round"]) == answer["spec_decode"]["num_accepted_tokens"]
    assert answer["timings_ms"]["ttft"] <= answer["timings_ms"]["e2el"]
    assert set(answer) == {
        "request_id", "text", "token_ids", "finish_reason", "usage", "spec_decode", "timings_ms", "preemptions",
    }  # fmt: skip


async def test_a_load_test_accounts_for_what_the_service_did(stack: Stack, client: AsyncClient, tmp_path: Path) -> None:
    before, file = await client.stats(), tmp_path / "out.json"
    # Due at almost the same time: one slot takes longer for two of them than passes between two.
    command = ["--rate", "1000", "--requests", "12", "--prompt-tokens", "20", "--max-tokens", "30", "--json", str(file)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laps_sd", "loadtest", "--server", stack.grpc, *command, "--detail"
    )
    assert await process.wait() in (0, FELL_BEHIND)
    after, results = await client.stats(), json.loads(file.read_text())
    probes = after.finished - before.finished - results["completed"]
    assert (results["completed"], results["total_output_tokens"], probes) == (12, 360, 2)
    assert after.output_tokens - before.output_tokens == 360 + probes
    assert results["max_concurrent_requests"] > 1
    assert len(results["timeline"]) > 0
    assert all(sum(round[0] for round in request["rounds"]) == 30 for request in results["requests"])


async def test_top_shows_who_runs_and_how_fast(client: AsyncClient) -> None:
    busy = asyncio.create_task(client.complete(**ENDLESS))
    async with asyncio.timeout(60):
        async for seen in frames(client, every_s=0.05, requests=5):
            frame = seen.as_dict()
            running = [each for each in frame["requests"] if each["state"] == "running" and each["output_tokens"]]
            rates = frame["rates"]["workers"]
            if running and any(rate["output_tokens"] for rate in rates.values()):
                break
    busy.cancel()
    (request,), (worker,) = running, frame["workers"]
    assert request["output_tokens"] < request["max_tokens"] == ENDLESS["max_tokens"]
    assert request["estimated_end_time"] > frame["read_time"]
    assert rates.keys() == {worker["worker_id"]}


async def until_finished(client: AsyncClient, request_id: str) -> None:
    async def finished() -> bool:
        return (await client.status(request_id)).state == "finished"

    await until(finished)
