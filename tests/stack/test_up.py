"""`laps-sd up` before anything is started: flags, ports, data, and that the services understand what they are told."""

import asyncio
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp
from typer.testing import CliRunner

from gateway.config import Settings as GatewaySettings
from laps_sd import targets
from laps_sd.apart import check_tokens, pointed
from laps_sd.cli import app
from laps_sd.client import AsyncClient, NotServing
from laps_sd.options import Options
from laps_sd.ports import StackError, claim_ports
from laps_sd.redis_server import own_redis
from laps_sd.stack import Stack, drafter_command, gateway_command, scheduler_command, to_stderr, worker_command
from laps_sd.supervise import Command
from scheduler_service.config import Settings as SchedulerSettings
from tests.waiting import WAIT_S
from worker_service.config import Settings as WorkerSettings
from worker_service.drafting.config import Settings as DrafterSettings

OPTIONS = Options(
    workers=2,
    slots=3,
    kv_tokens=4096,
    host_kv_tokens=512,
    policy="fcfs",
    draft_len=5,
    dtype="float32",
    drain_s=7,
    log_level="warning",
)


def understood(settings: type[BaseSettings], command: Command) -> dict[str, Any]:
    """The settings that a service reads from its command line, `python -P -m MODULE` taken off."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in command.environment.items():
            environment.setenv(name, value)
        return CliApp.run(settings, cli_args=list(command.arguments[4:])).model_dump()


def test_the_scheduler_understands_its_flags() -> None:
    log = Path("/logs/events.jsonl")
    options = Options(policy="laps-sd", policy_set=("queues=3", "key=remaining"), draft_len=5, event_log=log)
    told = understood(SchedulerSettings, scheduler_command(options, 7001, "unix:///r.sock"))
    assert (told["port"], told["redis_url"], told["draft_len"]) == (7001, "unix:///r.sock", 5)
    assert (told["policy"], told["policy_set"]) == ("laps-sd", ["queues=3", "key=remaining"])
    assert told["event_log"] == log


def test_of_several_schedulers_each_may_stand_by() -> None:
    for schedulers in (1, 2):
        command = scheduler_command(Options(schedulers=schedulers), 7001, "unix:///r.sock", 1)
        assert understood(SchedulerSettings, command)["standby"] == (schedulers > 1)
        assert command.name == ("scheduler-1" if schedulers > 1 else "scheduler")


def test_a_worker_understands_its_flags() -> None:
    told = understood(WorkerSettings, worker_command(OPTIONS, 1, "127.0.0.1:7001", Path("/models/m")))
    assert (told["worker_id"], told["scheduler"], told["model"]) == ("worker-1", "127.0.0.1:7001", "/models/m")
    assert (told["slots"], told["kv_tokens"], told["max_draft"], told["dtype"]) == (3, 4096, 5, "float32")
    assert told["host_kv_tokens"] == 512


def test_a_worker_of_ours_takes_no_whole_gpu_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "LAPS_SD_WORKER_KV_TOKENS"
    monkeypatch.delenv(name, raising=False)
    vllm = Options(engine="vllm", vllm_python=Path("/v/bin/python"))
    made = [worker_command(options, 0, "h:1", Path("/m")).environment for options in (Options(), vllm)]
    assert [environment.get(name) for environment in made] == ["32768", None]
    for told, expected in (("999", "999"), ("", "32768")):  # a worker takes an empty one for none
        monkeypatch.setenv(name, told)
        assert worker_command(Options(), 0, "h:1", Path("/m")).environment[name] == expected


def test_a_stack_without_certificates_is_asked_in_plaintext_whatever_other_servers_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAPS_SD_CA", "/nosuch")
    made = Stack([], "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", None, to_stderr).client()
    assert made._server.tls is False


async def test_where_waiting_is_of_no_use_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a certificate that nobody vouches for: the client itself asks again where that may help."""

    async def not_ready(*_: object) -> None:
        raise NotServing("nobody vouches for its certificate")

    monkeypatch.setattr(AsyncClient, "ready", not_ready)
    stack = Stack([], "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", None, to_stderr)
    with pytest.raises(NotServing, match="vouches"):
        await asyncio.wait_for(stack.ready(), WAIT_S)


def test_an_empty_variable_is_none_and_an_empty_flag_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPS_SD_WORKER_SLOTS", "")
    monkeypatch.setenv("LAPS_SD_WORKER_SCHEDULER", "other:1")
    told = CliApp.run(WorkerSettings, cli_args=["--model=m"])
    assert (told.slots, told.scheduler) == (4, "other:1")
    with pytest.raises(ValidationError, match=r"scheduler\n.*'' is not HOST:PORT"):
        CliApp.run(WorkerSettings, cli_args=["--model=m", "--scheduler="])


def test_a_draft_length_that_is_chosen_is_left_to_the_scheduler_within_the_workers_own_limit() -> None:
    options = Options(draft_len=None)
    scheduler = understood(SchedulerSettings, scheduler_command(options, 7001, "unix:///r.sock"))
    worker = understood(WorkerSettings, worker_command(options, 1, "127.0.0.1:7001", Path("/models/m")))
    assert (scheduler["draft_len"], worker["max_draft"]) == ("auto", 8)


def test_a_drafter_understands_its_flags() -> None:
    told = understood(DrafterSettings, drafter_command(OPTIONS, 0, 7004, Path("/models/s")))
    assert (told["port"], told["model"], told["dtype"], told["log_level"]) == (7004, "/models/s", "float32", "warning")


def test_each_worker_begins_with_another_drafter() -> None:
    options = pointed(replace(OPTIONS, drafters=2), [7004, 7005])
    commands = [worker_command(options, index, "127.0.0.1:7001", Path("/m")).arguments for index in range(3)]
    first, second = "127.0.0.1:7004", "127.0.0.1:7005"
    told = [words[list(words).index("--drafter") + 1] for words in commands]
    assert told == [f"remote:{first},{second}", f"remote:{second},{first}", f"remote:{first},{second}"]
    assert pointed(OPTIONS, []) == OPTIONS


def test_a_drafter_of_other_tokens_is_one_clear_line(tmp_path: Path) -> None:
    for name, vocabulary in (("big", {"a": 0, "b": 1}), ("same", {"b": 1, "a": 0}), ("other", {"a": 1, "b": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    check_tokens(tmp_path / "big", tmp_path / "same")
    with pytest.raises(StackError, match="--drafter-model: other has other tokens than big") as wrong:
        check_tokens(tmp_path / "big", tmp_path / "other")
    assert getattr(wrong.value, "hopeless", False)


def test_the_gateway_understands_its_flags_and_has_time_to_drain() -> None:
    command = gateway_command(replace(OPTIONS, max_requests=4000), 7002, 7003, "127.0.0.1:7001")
    told = understood(GatewaySettings, command)
    assert (told["grpc_port"], told["http_port"], told["scheduler"]) == (7002, 7003, "127.0.0.1:7001")
    assert command.stop_s > told["drain_s"] == 7
    assert told["max_requests"] == 4000


def test_workers_share_the_cores() -> None:
    alone = understood(WorkerSettings, worker_command(Options(workers=1), 0, "h:1", Path("/m")))["threads"]
    many = understood(WorkerSettings, worker_command(Options(workers=10_000), 0, "h:1", Path("/m")))["threads"]
    assert alone >= many == 1


def test_devices_share_the_worker_of_one_device() -> None:
    alone, shared = (worker_command(Options(devices=n), 0, "h:1", Path("/m")).arguments for n in (1, 2))
    flags = alone[4 : alone.index("--threads")]
    start = shared.index("worker_service")
    assert list(shared[start + 1 : start + 1 + len(flags)]) == list(flags)
    assert shared[shared.index("--nproc-per-node") + 1] == "2"


def test_stages_are_processes_of_one_worker_that_meet_on_loopback() -> None:
    shared = worker_command(Options(stages=3), 0, "h:1", Path("/m")).arguments
    assert shared[shared.index("--nproc-per-node") + 1] == "3"
    assert shared[shared.index("--stages") + 1] == "3"
    assert shared[shared.index("--rendezvous") + 1].startswith("127.0.0.1:")


def test_several_workers_do_not_share_devices() -> None:
    result = CliRunner().invoke(app, ["up", "--workers", "2", "--devices", "2"])
    assert result.exit_code == 2
    assert "one worker" in result.output


def test_a_taken_port_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StackError, match="choose another port"):
            claim_ports(taken.getsockname()[1])


def test_free_ports_are_all_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laps_sd.ports._ANY_PORT", range(20_000, 20_064))  # few: it would soon draw one twice
    assert len(set(claim_ports(*[0] * 30))) == 30


def test_a_port_that_is_asked_for_twice_is_one_clear_line() -> None:
    (free,) = claim_ports(0)
    with pytest.raises(StackError, match=f"cannot listen on 127.0.0.1:{free}"):
        claim_ports(free, free)


def test_two_stacks_never_share_the_data_of_one_redis(tmp_path: Path) -> None:
    options = Options(data_dir=tmp_path / "data")
    with own_redis(options, tmp_path), pytest.raises(StackError, match="used by another stack"):  # noqa: SIM117
        with own_redis(options, tmp_path):
            pass
    with own_redis(options, tmp_path) as (url, commands):
        assert url == f"unix://{tmp_path}/redis.sock"
        assert [command.name for command in commands] == ["redis"]


def test_what_prometheus_reads_is_there_only_while_the_stack_is(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    with targets.written(file, [("worker-0", "127.0.0.1:1")]):
        assert json.loads(file.read_text())[0]["targets"] == ["127.0.0.1:1"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--draft-len", "most"], "neither auto nor a number from 0 to 64"),
        (["--draft-len", "-1"], "neither auto nor a number from 0 to 64"),
        (["--drafter", "/a/path"], "none of none, ngram, default, remote:HOST:PORT, and no directory"),
        (["--drafter", "remote:nowhere"], "'nowhere' is not HOST:PORT"),
        (["--drafter", "remote:there:65536"], "'there:65536' is not HOST:PORT"),
        (["--drafters", "1"], "name the small model that --drafters run"),
        (["--drafters", "-1"], "--drafters"),
        (["--drafters", "1", "--drafter-model", "/no/such"], "'/no/such' does not exist"),
        (["--drafters", "1", "--drafter-model", "smollm2-135m", "--drafter", "ngram"], "follows from --drafters"),
        (["--drafter-model", "smollm2-135m"], "of which there are none"),
        (["--workers", "0"], "--workers"),
        (["--dtype", "int3"], "--dtype"),
        (["--certs", "/no/such"], "--certs"),
        (["--metrics-targets", "/no/such/file"], "--metrics-targets"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], problem: str) -> None:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["up", *flags])
    assert result.exit_code == 2
    assert problem in result.output


def test_a_port_of_any_number_is_none_that_an_outgoing_connection_could_have_taken() -> None:
    first = (
        int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if sys.platform == "linux"
        else 49_152
    )
    assert all(1024 < port < first for port in claim_ports(*[0] * 20))


async def test_it_says_when_it_ends_that_answers_may_go_on() -> None:
    said = list[bytes]()
    await Stack([], "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", None, said.append).stop()
    assert [json.loads(line)["event"] for line in said] == ["ending"]
