"""The whole stack with everything on: mutual TLS between services, API keys, Redis as a user with few rights."""

from pathlib import Path

import pytest

from gateway.keys import Right, new_key
from laps_sd.authority import REDIS_USER, make_certs
from laps_sd.client import AsyncClient
from protos.errors import NotServing, Unauthenticated
from tests.conftest import redis_server
from tests.e2e.stack import running_stack

ANSWER_S = 60.0


async def test_the_stack_answers_who_has_a_key_and_nobody_else(tiny_model: Path, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certs(certs)
    key, line = new_key("acme", [Right.GENERATE, Right.ADMIN])
    (tmp_path / "keys").write_text(line)
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis", "--aclfile", str(certs / "redis" / "users.acl")) as server:
        password = (certs / "scheduler" / "redis.password").read_text()
        redis_url = f"unix://{REDIS_USER}@{server.url.removeprefix('unix://')}?password={password}"
        flags = ["--certs", str(certs), "--api-keys", str(tmp_path / "keys"), "--redis", redis_url]
        async with running_stack(tiny_model, tmp_path, *flags) as stack:
            ca = certs / "gateway" / "ca.crt"
            async with AsyncClient(stack.grpc, api_key=key, ca=ca) as client:
                done = await client.complete("hello", max_tokens=20, ignore_eos=True, timeout_s=ANSWER_S)
                assert len(done.token_ids) == 20
                assert (await client.status(done.request_id)).tenant == "acme"
                assert (await client.stats()).finished == 1
            async with AsyncClient(stack.grpc, ca=ca) as client:
                with pytest.raises(Unauthenticated):
                    await client.complete("hello")
            async with AsyncClient(stack.grpc, api_key=key) as client:
                with pytest.raises(NotServing):
                    await client.complete("hello")
            assert not any(password in word for child in stack.children() for word in child.cmdline())
            assert await stack.stop() == 0
        log = (tmp_path / "up.log").read_text()
        assert "child_died" not in log
        assert not any(secret in log for secret in (key, password))
