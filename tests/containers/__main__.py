"""`make test-containers`: builds the images, runs the stack as docker-compose.yml says, on a tiny model at a pace of
its own, kills the main process of every container in mid-stream, and compares each text with the undisturbed one.

Where neither docker nor podman works it says so in a sentence and ends with 0.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.keys import Right, new_key
from laps_sd.client import AsyncClient
from tests.containers import engine as engines
from tests.containers import stand_in
from tests.containers.engine import ROOT, Engine, EngineError
from tests.containers.kills import Outcome, kill, undisturbed
from tests.tiny_model import make_tiny_model

FOLDER = ROOT / "build" / "containers"
TARGETS = ("service", "scheduler", "worker")
MOST_MB = {"service": 300, "worker": 1300}  # the worker's with torch's CPU build
SERVICES = ("worker-0", "worker-1", "scheduler", "redis", "gateway")
PORTS = {"GRPC_PORT": "50951", "ADMIN_PORT": "50954", "HTTP_PORT": "50980", "METRICS_PORT": "50990"}
PACE = {"draft_s": 0.0, "verify_s": 0.04, "verify_slope_s": 0.0, "prefill_token_s": 0.0, "verify_token_s": 0.0}
READY_S = 900.0
RESTART_S = 5.0  # for the engine's restart policy; after that the container is started by hand


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.containers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="kills of each service")
    parser.add_argument("--no-build", action="store_true", help="the images are there")
    parser.add_argument("--keep", action="store_true", help="leave the stack running")
    return parser.parse_args(words)


def prepare(
    program: str, compose: tuple[str, ...], arguments: dict[str, str], *, paced: bool = True
) -> tuple[Engine, str]:
    """The tiny model, a key, and what compose is told. Returns the engine and the key. `paced`: workers are as fast as
    PACE says."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_tiny_model(FOLDER / "cache" / "models" / "tiny", context_tokens=2048)
    (FOLDER / "keys").mkdir()
    key, line = new_key("test", [Right.GENERATE, Right.ADMIN])
    (FOLDER / "keys" / "api-keys").write_text(line + "\n")
    for path in (FOLDER, *FOLDER.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    override = FOLDER / "override.yml"
    environment = {"LAPS_SD_WORKER_PACE": json.dumps(PACE)} if paced else {}
    workers = {name: {"environment": environment} for name in SERVICES if name.startswith("worker")}
    override.write_text(json.dumps({"services": workers}))
    told = {"MODEL": "tiny", "CACHE": str(FOLDER / "cache"), "KEYS": str(FOLDER / "keys"), "DTYPE": "float32"}
    told |= {"KV_TOKENS": "8192", "SLOTS": "2", **PORTS, **arguments}
    files = (ROOT / "docker-compose.yml", override)
    return Engine(program, compose, told, files, "laps-sd-test"), key


def bases() -> dict[str, str]:
    """Build arguments and variables that name the base images; empty: those that the files pin."""
    if not os.environ.get("STAND_IN"):
        return {}
    return {"PYTHON_IMAGE": stand_in.PYTHON_IMAGE, "REDIS_IMAGE": stand_in.REDIS_IMAGE}


def check_containers(engine: Engine) -> list[str]:
    """The faults in how they run; read from the machine's own account of their processes."""
    problems = []
    for service in SERVICES:
        status = Path(f"/proc/{engine.pid(service)}/status").read_text()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
        if fields["Uid"][0] == "0" or int(fields["CapEff"][0], 16) or int(fields["CapBnd"][0], 16):
            problems.append(f"{service} has rights: {fields['Uid']} {fields['CapEff']} {fields['CapBnd']}")
        if fields["NoNewPrivs"] != ["1"] or fields["Seccomp"] != ["2"]:
            problems.append(f"{service} could rise: {fields['NoNewPrivs']} {fields['Seccomp']}")
        if service.startswith("worker") and "no native kernels" in engine.logs(service):
            problems.append(f"{service} has no kernels: {engine.logs(service)[-1000:]}")
    return problems


async def try_kills(engine: Engine, client: AsyncClient, rounds: int) -> int:
    """Prints what came of it. Returns the number of streams that broke."""
    texts, gap_s = await undisturbed(client)
    again, _ = await undisturbed(client)
    assert texts == again, "two undisturbed runs differ: nothing can be compared"
    print(f"undisturbed: {len(texts)} streams, longest gap {gap_s:.2f} s")

    def strike(service: str) -> bool:
        return engine.back(service, engine.kill(service), RESTART_S)

    outcomes = {service: Outcome() for service in SERVICES}
    for _ in range(rounds):
        for service in SERVICES:
            await kill(client, texts, service, strike, outcomes[service])
            await asyncio.to_thread(engine.until_healthy, SERVICES, READY_S)
    print(
        "| killed | kills | streams | other texts | longest gap | restarted by the engine |\n|---|---|---|---|---|---|"
    )
    for service, one in outcomes.items():
        print(f"| {service} | {one.kills} | {one.streams} | {one.broken} | {one.gap_s:.1f} s | {one.by_policy} |")
    kills, streams, broken = (
        sum(getattr(one, name) for one in outcomes.values()) for name in ("kills", "streams", "broken")
    )
    print(f"{kills} kills, {streams} streams, {broken} with another text")
    return broken


def main(words: Sequence[str]) -> int:
    given = parse(words)
    if (found := engines.find()) is None:
        print("skipped: neither Docker with its compose nor podman with podman-compose works here")
        return 0
    engine, key = prepare(*found, bases())
    try:
        if bases() and not (engine.has(stand_in.PYTHON_IMAGE) and engine.has(stand_in.REDIS_IMAGE)):
            stand_in.main()
        for target in () if given.no_build else TARGETS:
            engine.build(target, {name: value for name, value in bases().items() if name == "PYTHON_IMAGE"})
        sizes = {target: engine.size_mb(f"laps-sd/{target}:0.1.0") for target in TARGETS}
        print(f"{engine.program}: " + ", ".join(f"{target} {size:.0f} MB" for target, size in sizes.items()))
        problems = [f"{target} has {sizes[target]:.0f} MB" for target, most in MOST_MB.items() if sizes[target] > most]
        engine.up()
        (FOLDER / "ca.crt").write_text(engine.execute("gateway", "cat", "/certs/ca.crt") + "\n")

        async def run() -> int:
            async with AsyncClient(f"127.0.0.1:{PORTS['GRPC_PORT']}", ca=FOLDER / "ca.crt", api_key=key) as client:
                await client.ready(READY_S)
                await asyncio.to_thread(engine.until_healthy, SERVICES, READY_S)
                problems.extend(check_containers(engine))
                return await try_kills(engine, client, given.rounds)

        broken = asyncio.run(run())
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if not given.keep:
            engine.down()
    for problem in problems:
        print(problem)
    return 1 if broken or problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
