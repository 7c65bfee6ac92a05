"""The HTTP port shows the gRPC port's certificate and takes its keys."""

import ssl
from pathlib import Path

import httpx2

from gateway.keys import Right, new_key
from tests.gateway.harness import WAIT_S, Scheduler, gateway


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
