"""API keys over HTTP: who has none, whose request it is, and who may end it."""

from pathlib import Path

import openai
import pytest

from gateway.keys import Right, new_key
from protos.v1 import status_pb2
from tests.gateway.harness import WAIT_S
from tests.gateway.openai.harness import CHAT, HELLO, door


async def test_any_key_is_taken_while_keys_are_off() -> None:
    async with door() as at:
        answer = await at.http.get("/v1/models", headers={"authorization": "Bearer whatever"})
        assert answer.status_code == 200  # keys are off, and clients always send one


async def test_a_request_is_its_tenants_alone(tmp_path: Path) -> None:
    alice, line = new_key("alice", [Right.GENERATE])
    bob, other = new_key("bob", [Right.GENERATE])
    (tmp_path / "keys").write_text(f"{line}\n{other}\n")
    async with door(api_keys=tmp_path / "keys") as at:
        for path in ("/v1/models", "/v1/requests/r", "/v1/requests/r/stream"):
            answer = await at.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="wrong", timeout=WAIT_S) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="tiny", messages=HELLO)  # type: ignore[arg-type]

        _, submit = await at.answered(CHAT, headers={"authorization": f"Bearer {alice}"})
        assert submit.tenant == "alice"
        at.scheduler.known["r"] = status_pb2.RequestStatus(request_id="r", tenant="alice")
        at.scheduler.submitted["r"] = submit
        for verb, path in (("GET", ""), ("DELETE", ""), ("GET", "/stream")):
            answer = await at.http.request(verb, f"/v1/requests/r{path}", headers={"authorization": f"Bearer {bob}"})
            assert answer.status_code == 404
        answer = await at.http.get("/v1/requests/r", headers={"authorization": f"Bearer {alice}"})
        assert answer.status_code == 200
