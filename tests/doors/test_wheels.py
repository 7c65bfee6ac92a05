"""Both wheels, each installed into an empty environment and run there: what people get who install a built file."""

import asyncio
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.doors.wheels import REPOSITORY, build, environment, install, run
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.timeout(1800)]

OURS = {"protos", "gateway", "scheduler_service", "worker_service"}
HEAVY = {"torch", "transformers", "scipy", "redis", "tokenizers", "pydantic", "structlog", "starlette"}
ASK = """
import asyncio, sys
from laps_sd import AsyncClient, Client
server = sys.argv[1]
with Client(server) as client:
    answer = client.complete("Once upon a time", max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids) == answer.usage.completion_tokens == 8, answer
    assert client.status(answer.request_id).state == "finished"
    assert client.stats().workers
    assert [chunk.offset for chunk in client.resume(answer.request_id, 8)]
    made = client.complete("Is it so?", choice=["yes", "no"])
    assert made.text in ("yes", "no"), made

async def ask():
    async with AsyncClient(server) as client:
        return (await client.complete("Once upon a time", max_tokens=8, ignore_eos=True)).token_ids
assert asyncio.run(ask()) == answer.token_ids
"""
NOBODY = ("generate", "x", "--server", "127.0.0.1:1")
NOBODY_SAID = "laps-sd: UNAVAILABLE: nothing listens at 127.0.0.1:1: is `laps-sd up` running there?\n"


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(REPOSITORY / "deploy" / "client", tmp_path_factory.mktemp("client-wheel"))


@pytest.fixture(scope="module")
def service_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(REPOSITORY, tmp_path_factory.mktemp("service-wheel"))


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="session")
async def test_the_client_alone_calls_a_live_service(stack: Stack, client_wheel: Path, tmp_path: Path) -> None:
    programs = await asyncio.to_thread(environment, tmp_path / "empty", client_wheel)
    (packages,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    installed = {each.name for each in packages.iterdir()}
    assert "laps_sd" in installed
    assert not installed & OURS
    listed = run(programs / "python", "-m", "pip", "list", "--format=freeze").stdout
    assert not {line.partition("==")[0] for line in listed.splitlines()} & HEAVY
    asked = await asyncio.to_thread(run, programs / "python", "-c", ASK, stack.grpc, folder=tmp_path)
    assert asked.returncode == 0, asked.stderr


@pytest.fixture(scope="module")
def service(service_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the service's wheel. Its dependencies take minutes, so there is one."""
    return environment(tmp_path_factory.mktemp("service") / "empty", service_wheel)


def test_the_service_is_whole_and_its_command_runs(service: Path, tmp_path: Path) -> None:
    assert "0.1.0" in run(service / "laps-sd", "--version", folder=tmp_path).stdout
    helped = run(service / "laps-sd", "up", "--help", folder=tmp_path)
    assert (helped.returncode, "--policy" in helped.stdout) == (0, True), helped.stderr
    asked = run(service / "laps-sd", *NOBODY, folder=tmp_path)
    assert (asked.returncode, asked.stderr) == (1, NOBODY_SAID)
    assert run(service / "python", "-m", "pip", "check").returncode == 0


def test_the_services_wheel_has_every_file_of_its_packages(service_wheel: Path) -> None:
    folders = ["laps_sd", *sorted(OURS)]
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    kept = set(zipfile.ZipFile(service_wheel).namelist())
    left_out = {"protos/reference.binpb", "protos/link/buf.yaml"}  # for `make lint-protos` alone
    missing = {file for file in set(tracked.stdout.split()) - kept - left_out if not file.endswith(".md")}
    assert not missing


def test_the_client_beside_the_service_works_whichever_was_last(
    service: Path, client_wheel: Path, service_wheel: Path, tmp_path: Path
) -> None:
    both = "import laps_sd.client, laps_sd._protos.v1.inference_pb2, protos.v1.inference_pb2"
    for last in (client_wheel, service_wheel):
        install(service, "--no-deps", "--force-reinstall", last)
        asked = run(service / "laps-sd", *NOBODY, folder=tmp_path)
        assert (asked.returncode, asked.stderr) == (1, NOBODY_SAID)
        assert run(service / "python", "-c", both, folder=tmp_path).returncode == 0
