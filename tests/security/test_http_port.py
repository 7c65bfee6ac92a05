"""The HTTP port shows the gRPC port's certificate and takes its keys."""

import ssl
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gateway.keys import Right, new_key
from tests.gateway.harness import WAIT_S, Scheduler, gateway
from tests.gateway.openai.harness import door


async def test_metrics_need_the_right_admin_where_strangers_can_come(tmp_path: Path, certs: Path) -> None:
    user, user_line = new_key("a", [Right.GENERATE])
    admin, admin_line = new_key("ops", [Right.ADMIN])
    (tmp_path / "keys").write_text(f"{user_line}\n{admin_line}\n")
    files = {"cert": certs / "gateway" / "tls.crt", "key": certs / "gateway" / "tls.key"}
    scheduler = Scheduler()
    await scheduler.start()
    context = ssl.create_default_context(cafile=certs / "gateway" / "ca.crt")
    async with gateway(scheduler, host="0.0.0.0", api_keys=tmp_path / "keys", **files) as served:
        base = f"https://127.0.0.1:{served.http.rpartition(':')[2]}"
        async with httpx2.AsyncClient(base_url=base, verify=context, timeout=WAIT_S) as client:

            async def status(key: str | None) -> int:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return (await client.get("/metrics", headers=headers)).status_code

            assert [await status(None), await status("wrong"), await status(user), await status(admin)] == [
                *(401, 401, 403, 200)
            ]
            assert (await client.get("/live")).status_code == 200
    await scheduler.stop()


async def test_openais_client_trusts_the_authority_that_ssl_cert_file_names(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/how-to/openai.md says."""
    key, line = new_key("a", [Right.GENERATE])
    (tmp_path / "keys").write_text(line)
    files: dict[str, Any] = {"cert": certs / "gateway" / "tls.crt", "key": certs / "gateway" / "tls.key"}
    monkeypatch.setenv("NO_PROXY", "*")
    async with door(api_keys=tmp_path / "keys", **files) as at:
        where: dict[str, Any] = {"base_url": f"https://{at.gateway.http}/v1", "api_key": key, "max_retries": 0}
        async with openai.AsyncOpenAI(timeout=WAIT_S, **where) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()
        monkeypatch.setenv("SSL_CERT_FILE", str(certs / "gateway" / "ca.crt"))
        async with openai.AsyncOpenAI(timeout=WAIT_S, **where) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
