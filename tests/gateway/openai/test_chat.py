"""Chat completions over HTTP: what the scheduler is given, and what the client is told, whole and streamed."""

import asyncio
import json

import pytest

from gateway.openai import generating
from protos.idempotence import MOST_ID_CHARS, REQUEST_ID
from protos.v1 import types_pb2
from tests.gateway.harness import WAIT_S, ending, ids
from tests.gateway.openai.harness import CHAT, HELLO, door, events, logprobs


async def test_a_plain_answer_has_every_field_that_clients_read() -> None:
    async with door() as at:
        answer, submit = await at.answered(CHAT | {"request_id": "mine"}, "jumps")
        said = answer.json()
        tokens = len(ids("jumps"))
        assert (said["id"], said["object"], said["model"]) == ("chatcmpl-mine", "chat.completion", "tiny")
        message = {"role": "assistant", "content": "jumps", "refusal": None}
        assert said["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
        assert said["usage"] == {
            "prompt_tokens": len(submit.prompt),
            "completion_tokens": tokens,
            "total_tokens": len(submit.prompt) + tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": tokens,
                "rejected_prediction_tokens": 3 * tokens,
            },
        }
        assert answer.headers["x-request-id"] == "mine" == submit.request_id


async def test_a_plain_answer_tells_what_speculation_did() -> None:
    async with door() as at:
        task = at.asked(CHAT)
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ids("ju"), drafted=4, accepted=1)
        await at.link.delta(submit, len(ids("ju")), ids("mps"), drafted=2, accepted=2)
        end = ending(preemptions=3, rounds=2, queue_ms=12.5)
        await at.link.delta(submit, len(ids("ju")) + len(ids("mps")), ending=end)
        said = (await task).json()
        assert said["laps_sd"] == {"preemptions": 3, "rounds": 2}
        assert said["metrics"]["queue_time_ms"] == 12.5
        assert said["metrics"]["speculative_decoding"] == {
            "mean_acceptance_length": 2.5,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [0, 1, 1],
            "num_spec_steps": 2,
            "num_accepted_draft_tokens": 3,
            "num_draft_tokens": 6,
            "num_spec_tokens": 4,
        }


async def test_a_stream_has_the_role_with_the_first_token_and_the_reason_once() -> None:
    async with door() as at:
        answer, _ = await at.answered(CHAT | {"stream": True}, "jumps")
        said = events(answer)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert said.pop() == "[DONE]"
        assert {(each["object"], each["id"], each["created"]) for each in said} == {
            ("chat.completion.chunk", said[0]["id"], said[0]["created"])
        }
        deltas = [each["choices"][0]["delta"] for each in said]
        assert [("role" in delta) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        assert "".join(delta.get("content", "") for delta in deltas) == "jumps"
        assert [each["choices"][0]["finish_reason"] for each in said] == [None] * (len(said) - 1) + ["stop"]
        assert all("usage" not in each for each in said)
        assert said[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def test_usage_comes_last_or_in_every_chunk() -> None:
    async with door() as at:
        asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        answer, _ = await at.answered(asked, "jumps")
        *said, last, done = events(answer)
        assert done == "[DONE]"
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(ids("jumps")))
        assert all("usage" not in each for each in said)

        asked["stream_options"] = {"continuous_usage_stats": True}
        answer, _ = await at.answered(asked, "jumps")
        counts = [each["usage"]["completion_tokens"] for each in events(answer)[:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == len(ids("jumps"))


async def test_an_event_is_one_line_however_a_client_splits_text() -> None:
    text = "a\u2028b\x85c\u2029d\ne"
    async with door() as at:
        answer, _ = await at.answered(CHAT | {"stream": True}, text)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        said = [json.loads(line) for line in lines[:-1]]
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in said) == text


async def test_choices_have_ids_and_seeds_of_their_own_and_usage_is_of_all() -> None:
    async with door() as at:
        task = at.asked(
            CHAT | {"n": 3, "seed": -1, "request_id": "r", "stream": True, "stream_options": {"include_usage": True}}
        )
        submits = [await at.link.accept() for _ in range(3)]
        assert [each.request_id for each in submits] == ["r-0", "r-1", "r-2"]
        assert submits[0].sampling.seed == 2**64 - 1
        assert len({each.sampling.seed for each in submits}) == 3
        for submit, text in zip(reversed(submits), ("a", "b", "c"), strict=True):
            await at.say(submit, text)
        *said, last, _ = events(await task)
        roles = [each["choices"][0]["index"] for each in said if "role" in each["choices"][0]["delta"]]
        assert roles == [each["choices"][0]["index"] for each in said[:3]] == [0, 1, 2]
        texts = dict.fromkeys(range(3), "")
        for each in said:
            (choice,) = each["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "c", 1: "b", 2: "a"}
        assert last["usage"]["prompt_tokens"] == len(submits[0].prompt)
        assert last["usage"]["completion_tokens"] == 3


async def test_of_several_choices_the_wait_is_that_of_the_one_that_waited_least() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"n": 2})
        for queue_ms in (40.0, 7.0):
            await at.link.delta(await at.link.accept(), 0, ids("a"), ending=ending(queue_ms=queue_ms))
        assert (await task).json()["metrics"]["queue_time_ms"] == 7


async def test_the_ids_of_several_choices_are_valid_whatever_the_id_of_the_body() -> None:
    longest, seen = "x" * MOST_ID_CHARS, set[str]()
    async with door() as at:
        for id in (longest, longest[:-1] + "y"):
            task = at.asked(CHAT | {"n": 2, "request_id": id})
            ids_of = [(await at.link.accept()).request_id for _ in range(2)]
            assert all(REQUEST_ID.fullmatch(each) for each in ids_of)
            seen.update(ids_of)
            task.cancel()
            for _ in range(2):
                await at.link.next("cancel")
        assert len(seen) == 4


async def test_log_probabilities_have_exact_bytes() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"logprobs": True, "top_logprobs": 2})
        submit = await at.link.accept()
        assert submit.sampling.logprobs == 2
        tokens = ids("ä!")  # half a character each, then one
        await at.link.delta(submit, 0, tokens, logprobs=logprobs(tokens, 2), ending=ending())
        (choice,) = (await task).json()["choices"]
        content = choice["logprobs"]["content"]
        assert (
            bytes(byte for entry in content for byte in entry["bytes"]).decode() == "ä!" == choice["message"]["content"]
        )
        assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd", "!"]
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
        assert content[0]["top_logprobs"][1]["logprob"] == -1.5


async def test_log_probabilities_of_no_alternatives_are_empty_lists() -> None:
    async with door() as at:
        task = at.asked(CHAT | {"logprobs": True, "stream": True})
        submit = await at.link.accept()
        tokens = ids("jumps")
        await at.link.delta(submit, 0, tokens, logprobs=logprobs(tokens), ending=ending())
        first = events(await task)[0]["choices"][0]
        assert [entry["top_logprobs"] for entry in first["logprobs"]["content"]] == [[]] * len(tokens)


async def test_log_probabilities_of_a_whole_answer_are_bounded_and_those_of_a_stream_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are kept until all choices have ended."""
    monkeypatch.setattr(generating, "MOST_SCORES", 12)
    asked = CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}
    async with door() as at:
        for most in (2, 3):
            whole = at.asked(asked)
            for submit in [await at.link.accept() for _ in range(2)]:
                await at.link.delta(submit, 0, [40] * most, logprobs=logprobs([40] * most, 2), ending=ending())
            answer = await asyncio.wait_for(whole, WAIT_S)
            assert answer.status_code == (200 if most == 2 else 400)
        assert answer.json()["error"]["param"] == "top_logprobs"
        stream = at.asked(asked | {"stream": True})
        for submit in [await at.link.accept() for _ in range(2)]:
            await at.link.delta(submit, 0, [40] * 9, logprobs=logprobs([40] * 9, 2), ending=ending())
        assert events(await asyncio.wait_for(stream, WAIT_S))[-1] == "[DONE]"


async def test_parts_are_joined_and_a_developer_is_a_system() -> None:
    async with door() as at:
        _, one = await at.answered(CHAT | {"messages": [{"role": "system", "content": "be kind"}, *HELLO]})
        parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
        _, other = await at.answered(CHAT | {"messages": [{"role": "developer", "content": parts}, *HELLO]})
        assert list(one.prompt) == list(other.prompt)


async def test_defaults_are_openais() -> None:
    async with door(context_tokens=1000) as at:
        _, submit = await at.answered(CHAT)
        assert submit.sampling.temperature == 1
        assert submit.limits.max_tokens == 1000 - len(submit.prompt)
        assert submit.priority == types_pb2.PRIORITY_DEFAULT


async def test_fields_of_the_request_reach_the_scheduler() -> None:
    async with door() as at:
        fields = {
            "max_completion_tokens": 7,
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "stop": "x",
            "presence_penalty": 1,
            "logit_bias": {"5": -100},
            "class": "batch",
            "predicted_tokens": 4,
            "timeout_s": 50,
            "on_disconnect": "detach",
            "user": "somebody",
            "store": True,
            "seed": None,
        }
        _, submit = await at.answered(CHAT | fields)
        assert submit.limits.max_tokens == 7
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (0.5, 0.25, 3)
        assert list(submit.limits.stop) == ["x"]
        assert [(each.token, each.bias) for each in submit.sampling.logit_bias] == [(5, -100)]
        assert (submit.priority, submit.predicted_tokens) == (types_pb2.PRIORITY_BATCH, 4)
        assert submit.on_disconnect == types_pb2.ON_DISCONNECT_DETACH
        assert 40 < submit.timeout_s <= 50


async def test_an_error_before_the_first_token_has_a_status_and_one_after_it_is_an_event() -> None:
    async with door() as at:
        for stream in (True, False):
            task = at.asked(CHAT | {"stream": stream})
            submit = await at.link.accept()
            await at.link.delta(submit, 0, ending=ending(types_pb2.FINISH_REASON_DEADLINE))
            answer = await task
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false"
        task = at.asked(CHAT | {"stream": True})
        submit = await at.link.accept()
        async with asyncio.timeout(WAIT_S):
            await at.link.delta(submit, 0, ids("jumps"))
            await at.link.delta(
                submit, len(ids("jumps")), ending=ending(types_pb2.FINISH_REASON_ERROR, message="it broke")
            )
            said = events(await task)
        assert said[-1]["error"] == {
            "message": "it broke",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_request_is_an_error_and_no_answer(stream: bool) -> None:
    async with door() as at:
        task = at.asked(CHAT | {"stream": stream, "request_id": "r"})
        submit = await at.link.accept()
        assert (await at.http.delete("/v1/requests/r")).status_code == 200
        assert (await at.link.next("cancel")).request_id == "r"
        await at.link.delta(submit, 0, ending=ending(types_pb2.FINISH_REASON_CANCELLED))
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
