"""Records what the code of a checkout writes to Redis. In the root of that checkout:

    PYTHONPATH=. python .../tests/scheduler/stored/record.py redis-server .../tests/scheduler/stored/schema-1.0.json

`redis-server` is the program of a Redis server. schema-1.0.json is what commit 239cc7b wrote, the last one before
records had a version.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from protos.link.v1 import common_pb2 as common_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.store import RedisStore
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler

FAR = 4_102_444_800_000  # the year 2100, in ms
SAMPLED = common_pb.Sampling(temperature=1, top_p=0.9, seed=7, logprobs=1)
HEADS = common_pb.Logprobs(tokens=[types_pb.Logprob(logprob=-0.5, top_tokens=[7], top_logprobs=[-0.5])])


async def write(url: str) -> None:
    """Requests that run, are paused, wait and have ended; some with everything that a request can have."""
    store = RedisStore(url)
    async with scheduler(store, policy="fcfs", predictor="none") as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target, slots=2).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("ended")
        await worker.until("ended")
        await worker.report(worker.row("ended", 0, 1, 2, finish=types_pb.FINISH_REASON_STOP))
        await gateway.until(lambda: "ended" in gateway.endings)
        more: dict[str, Any] = {"tenant": "kiosk", "deadline_unix_ms": FAR, "predicted_tokens": 40, "class": 1}
        await gateway.submit("runs", 1, 2, 3, 4, sampling=SAMPLED, **more)
        await gateway.submit("paused", 5, 6)
        await gateway.submit("waits", 7, 8, 9)
        await gateway.until(lambda: {"runs", "paused", "waits"} <= gateway.accepted)
        while len(worker.command.schedule) < 3:
            await worker.next_command()
        await worker.report(
            worker.row("runs", 0, 7, drafted=4, accepted=0, prefilled=4, logprobs=HEADS), worker.row("paused", 0, 3)
        )
        for start in (1, 3):  # rounds that change nothing else are in the log alone
            await worker.report(worker.row("runs", start, 8, 9, drafted=4, accepted=1))
        await gateway.until(lambda: len(gateway.tokens.get("runs", ())) == 5)
        await gateway.close()
        await worker.close()
    await store.close()


def recorded(url: str) -> dict[str, Any]:
    """Of each key: type, seconds to live (-1: for ever) and value; bytes as Latin-1 text."""
    with redis.Redis.from_url(url, decode_responses=True, encoding="latin-1") as client:
        values = {
            "hash": lambda key: dict(sorted(client.hgetall(key).items())),
            "string": client.get,
            "set": lambda key: sorted(client.smembers(key)),
            "zset": lambda key: dict(client.zrange(key, 0, -1, withscores=True)),
        }
        kinds = {key: client.type(key) for key in sorted(client.keys())}
        return {key: (kind, client.ttl(key), values[kind](key)) for key, kind in kinds.items()}


def main(server: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        command = [server, "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not socket.exists():
            time.sleep(0.01)
        asyncio.run(write(f"unix://{socket}"))
        file.write_text(json.dumps(recorded(f"unix://{socket}"), indent=1) + "\n")
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
