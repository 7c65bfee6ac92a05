"""What `laps-sd up` is told, by flags, by the environment and by laps-sd.toml, and what it refuses before it starts any
process."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.config import Settings as GatewaySettings
from laps_sd.authority import make_certs
from laps_sd.cli import app
from laps_sd.flags import flags_of
from laps_sd.options import Options
from laps_sd.stack import claim_ports, gateway_command, worker_command
from protos import bounds
from protos.settings import BAD_SETTINGS, ServiceSettings, read, refuse_misspelt_variables
from scheduler_service.config import Settings as SchedulerSettings
from tests.tiny_model import make_tiny_model
from worker_service.config import Settings as WorkerSettings
from worker_service.drafting.config import Settings as DrafterSettings
from worker_service.engine.warm_up import WARM_UP_TOKENS
from worker_service.vllm_engine.config import Settings as VllmSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Options]:
    """The options that a stack would start with; none is started. The current folder is empty."""
    options: list[Options] = []
    monkeypatch.setattr("laps_sd.serve.run_stack", lambda given, use, **_: options.append(given))
    monkeypatch.chdir(tmp_path)
    return options


def up(*flags: object, **variables: str) -> Any:
    return CliRunner(env=variables).invoke(app, ["up", "--grpc-port", "0", "--http-port", "0", *map(str, flags)])


def refused(*flags: object, **variables: str) -> str:
    """The one sentence that it says."""
    result = up(*flags, **variables)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return str(result.stderr)


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_the_command_line_counts_more_than_the_environment_and_that_more_than_the_file(
    started: list[Options], tmp_path: Path
) -> None:
    write(tmp_path / "laps-sd.toml", "workers = 2\nslots = 2\nkv_tokens = 2000\nschedulers = 2")
    assert up("--slots", 8, LAPS_SD_SLOTS="4", LAPS_SD_WORKERS="3").exit_code == 0
    (options,) = started
    assert (options.slots, options.workers, options.kv_tokens, options.schedulers) == (8, 3, 2000, 2)


def test_a_setting_may_stand_in_the_section_of_its_service(started: list[Options], tmp_path: Path) -> None:
    file = write(
        tmp_path / "service.toml",
        '[scheduler]\npolicy = "laps-sd"\npolicy_set = ["queues=3"]\ndraft_len = "auto"\n[worker]\nslots = 2\n',
    )
    assert up("--config", file).exit_code == 0
    assert (started[0].policy, started[0].policy_set, started[0].slots) == ("laps-sd", ("queues=3",), 2)
    assert started[0].draft_len is None


def test_further_settings_of_a_service_reach_it_unless_the_environment_has_them(
    started: list[Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[gateway]\nmax_requests = 7\nstalled_s = 9\n[worker]\nblock_tokens = 32\n"
    assert up("--config", write(tmp_path / "more.toml", text)).exit_code == 0
    monkeypatch.setenv("LAPS_SD_GATEWAY_STALLED_S", "5")
    monkeypatch.setenv("LAPS_SD_WORKER_BLOCK_TOKENS", "")  # as compose passes on what nobody has set
    gateway = gateway_command(started[0], 1, 2, "h:1").environment
    worker = worker_command(started[0], 0, "h:1", Path("/m")).environment
    assert (gateway["LAPS_SD_GATEWAY_MAX_REQUESTS"], worker["LAPS_SD_WORKER_BLOCK_TOKENS"]) == ("7", "32")
    assert "LAPS_SD_GATEWAY_STALLED_S" not in gateway


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("slotz = 2", "unknown setting 'slotz'; did you mean slots?"),
        ("[gatway]\nmax_requests = 2", "unknown setting 'gatway'; did you mean gateway?"),
        ("slots = 2.5", "'--slots': Input should be a valid integer"),
        ("slots = 0", "(from "),
        ("[slots]\nn = 2", "slots is a value, no section"),
        ("slots = 2\n[worker]\nslots = 3", "slots stands there twice, once in [worker]"),
        ("[worker]\nblock_tokens = 0", "[worker] block_tokens: Input should be greater than or equal to 1"),
        ("[scheduler]\nredis_replicas = 2", "[scheduler] redis_replicas: is of a Redis of your own"),
        ("[gateway]\nnonsense = 1", "[gateway] nonsense: no such setting"),
        ("[gateway]\nscheduler = 'h:1'", "[gateway] scheduler: `laps-sd up` sets this itself"),
        ("[gateway]\nstalled_s = 2024-01-01", "[gateway] stalled_s: no setting is a date or a time"),
        ("[gateway]\ncors_origins = [1979-05-27]", "[gateway] cors_origins: no setting is a date or a time"),
        ("this is no TOML", "Expected"),
        ("gateway = 3", "gateway is a section: write [gateway]"),
        ("[[worker]]\nslots = 3", "worker is a section: write [worker]"),
        ("model = ['one', 'two']", "model is one value, no list"),
    ],
)
def test_a_wrong_file_is_one_sentence(started: list[Options], tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refused("--config", write(tmp_path / "wrong.toml", text))
    assert not started


def test_a_misspelt_variable_is_one_sentence(started: list[Options]) -> None:
    assert "LAPS_SD_SLOT is no setting; did you mean LAPS_SD_SLOTS?" in refused(LAPS_SD_SLOT="2")
    assert not started


@pytest.mark.parametrize(
    "variable", ["LAPS_SD_API_KEY", "LAPS_SD_SCHEDULER_HOST", "LAPS_SD_WORKER_SLOTS", "LAPS_SD_CA", "LAPS_SD_NOTES"]
)
def test_variables_of_others_are_left_alone(started: list[Options], variable: str) -> None:
    assert up(**{variable: "3"}).exit_code == 0
    assert started


@pytest.mark.parametrize(
    ("wrong", "meant"), [("GATEWAY_MAX_REQESTS", "GATEWAY_MAX_REQUESTS"), ("TLS_CERTS", "TLS_CERT")]
)
def test_a_service_refuses_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, meant: str
) -> None:
    monkeypatch.setattr("sys.argv", ["gateway"])
    monkeypatch.setenv(f"LAPS_SD_{wrong}", "9")
    with pytest.raises(SystemExit) as ended:
        read(GatewaySettings, "gateway")
    assert ended.value.code == BAD_SETTINGS
    assert capsys.readouterr().err == f"gateway: LAPS_SD_{wrong} is no setting; did you mean LAPS_SD_{meant}?\n"


@pytest.mark.parametrize("kind", [WorkerSettings, VllmSettings, SchedulerSettings, GatewaySettings, DrafterSettings])
def test_no_service_takes_a_variable_of_up_for_a_misspelt_one(
    kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flag of `up` may come in a variable of its service, which that service inherits."""
    prefix = str(kind.model_config["env_prefix"])
    for name, flag in flags_of(Options).items():
        if prefix == f"LAPS_SD_{str(flag.service).upper()}_":
            monkeypatch.setenv(f"{prefix}{name.upper()}", "1")
    refuse_misspelt_variables(kind)


@pytest.mark.parametrize(("one", "other"), [(WorkerSettings, VllmSettings), (VllmSettings, WorkerSettings)])
def test_a_worker_leaves_the_variables_of_another_engine_alone(
    one: type[ServiceSettings], other: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docker-compose.yml sets LAPS_SD_WORKER_DEVICE for whichever it is."""
    for name in one.model_fields:
        monkeypatch.setenv(f"LAPS_SD_WORKER_{name.upper()}", "1")
    refuse_misspelt_variables(other)


def test_a_misspelt_variable_of_a_service_is_told_before_anything_starts(
    started: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPS_SD_WORKER_SLOT", "2")
    assert "LAPS_SD_WORKER_SLOT is no setting; did you mean LAPS_SD_WORKER_SLOTS?" in refused()
    assert not started


def test_a_services_setting_that_up_has_no_flag_for_is_asked_for_by_its_whole_name(
    started: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPS_SD_MAX_REQUESTS", "5")
    assert "LAPS_SD_MAX_REQUESTS is no setting" in (said := refused())
    assert "did you mean LAPS_SD_GATEWAY_MAX_REQUESTS?" in said
    assert not started


def test_up_leaves_a_variable_of_kubernetes_alone(started: list[Options]) -> None:
    assert up(LAPS_SD_PORT="tcp://10.0.0.1:8080").exit_code == 0
    assert started


def test_several_values_in_a_variable_that_cannot_be_read_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPS_SD_GATEWAY_CORS_ORIGINS", "http://one")
    assert 'several values are written as JSON, such as ["one", "two"]' in refused()


def test_a_service_leaves_a_variable_of_kubernetes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gateway"])
    monkeypatch.setenv("LAPS_SD_GATEWAY_PORT", "tcp://10.0.0.1:8080")
    assert read(GatewaySettings, "gateway").http_port == 8080


def test_what_may_be_a_list_may_be_one_value(started: list[Options], tmp_path: Path) -> None:
    assert up("--config", write(tmp_path / "one.toml", "policy_set = 'ageing=0.1'")).exit_code == 0
    assert started[0].policy_set == ("ageing=0.1",)


def test_a_file_that_is_not_there_is_one_sentence(started: list[Options]) -> None:
    assert "/no/such.toml: No such file or directory" in refused("--config", "/no/such.toml")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--policy", "nosuch"], "'--policy': unknown policy 'nosuch'; known: fcfs"),
        (["--policy-set", "nosuch=1"], "'--policy-set': 'nosuch=1' is not name=value with a setting of default"),
        (["--kv-tokens", "1"], "'--kv-tokens': Input should be greater than or equal to 192"),
        (["--slots", "1025"], "'--slots': Input should be less than or equal to 1024"),
        (["--device", "cuda"], "'--device': this machine has no CUDA device"),
        (["--dtype", "int3"], "'--dtype': 'int3' is not one of"),
        (["--workers", "2", "--devices", "2"], "'--devices': goes with one worker"),
        (["--devices", "2"], "'--devices': 2 devices cannot share the 3 heads"),
        (["--workers", "2", "--stages", "2"], "'--stages': goes with one worker"),
        (["--devices", "3", "--stages", "2"], "'--stages': spreads a model by layers, --devices by heads"),
        (["--devices", "3", "--weights", "int8"], "'--weights': int8 is of one process alone"),
        (["--stages", "2", "--weights", "int4"], "'--weights': int4 is of one process alone"),
        (["--stages", "31"], "'--stages': 31 stages are more than the 30 layers of smollm2-135m"),
        (["--max-backlog-s", "-1"], "'--max-backlog-s': '-1' is neither auto nor a number"),
        (["--api-keys", "/no/such"], "'--api-keys': /no/such: No such file or directory"),
        (["--tenants", "/no/such"], "'--tenants': /no/such: No such file or directory"),
        (["--certs", "/no/such"], "'--certs': /no/such is no directory"),
        (["--metrics-targets", "/usr"], "'--metrics-targets': /usr cannot be written"),
        (["--data-dir", "/etc/hostname"], "'--data-dir': /etc/hostname is no directory"),
        (["--redis", "http://h"], "'--redis': "),
        (["--redis", "redis://127.0.0.1:1"], "'--redis': no Redis at 127.0.0.1:1"),
        (["--model", "nosuch"], "'--model': 'nosuch' does not exist"),
        (["--model", "~nobody-of-that-name/m"], "'--model': ~nobody-of-that-name/m: "),
        (["--drafter", "~nobody-of-that-name/m"], "'--drafter': ~nobody-of-that-name/m: "),
        (["--engine", "vllm", "--vllm-python", "~nobody-of-that-name/m"], "'--vllm-python': ~nobody-of-that-name/m: "),
        (["--model", "/no/such"], "'--model': '/no/such' does not exist"),
        (
            ["--drafter", "/no/such"],
            "'--drafter': '/no/such' is none of none, ngram, default, remote:HOST:PORT, and no directory",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    started: list[Options], monkeypatch: pytest.MonkeyPatch, flags: list[str], problem: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine without a GPU
    assert problem in refused(*flags)
    assert not started


def test_a_wrong_variable_of_a_service_is_told_as_well(started: list[Options]) -> None:
    problem = refused(LAPS_SD_GATEWAY_STALLED_S="-1")
    assert "[gateway] stalled_s: Input should be greater than 0" in problem


def test_a_list_that_is_no_json_is_one_sentence(started: list[Options], tmp_path: Path) -> None:
    problem = '[gateway]: error parsing value for field "model_aliases"'
    assert problem in refused(LAPS_SD_GATEWAY_MODEL_ALIASES="gpt-4o")
    assert problem in refused("--config", write(tmp_path / "one.toml", '[gateway]\nmodel_aliases = "gpt-4o"'))


def test_a_service_says_the_same_of_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LAPS_SD_GATEWAY_MODEL_ALIASES", "gpt-4o")
    monkeypatch.setattr("sys.argv", ["gateway", "--scheduler", "h:1"])
    with pytest.raises(SystemExit) as end:
        read(GatewaySettings, "gateway")
    assert end.value.code == BAD_SETTINGS
    assert capsys.readouterr().err.startswith('gateway: error parsing value for field "model_aliases"')


def test_ports_that_are_equal_or_taken_are_one_sentence(started: list[Options]) -> None:
    (free,) = claim_ports(0)
    assert "is --grpc-port already" in refused("--grpc-port", free, "--http-port", free)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "'--http-port': cannot listen on" in refused("--http-port", taken.getsockname()[1])


def test_certificates_and_keys_that_cannot_be_used_are_one_sentence(started: list[Options], tmp_path: Path) -> None:
    assert "'--certs': " in refused("--certs", tmp_path)
    assert "'--api-keys': " in refused("--api-keys", write(tmp_path / "keys", "no key"))
    assert "'--tenants': " in refused("--tenants", write(tmp_path / "tenants", "me weight=many"))


def test_certificates_that_have_expired_are_one_sentence(started: list[Options], tmp_path: Path) -> None:
    make_certs(tmp_path, days=-1)
    assert "'--certs': " in (sentence := refused("--certs", tmp_path))
    assert "expired on 2" in sentence
    assert not started


def test_a_head_that_reads_layers_which_other_stages_have_is_one_sentence(
    started: list[Options], tmp_path: Path
) -> None:
    write(tmp_path / "config.json", '{"architectures": ["LlamaForCausalLMEagle3"]}')
    problem = refused("--stages", "2", "--drafter", tmp_path)
    assert "'--drafter': an EAGLE-3 head reads layers of which other --stages know" in problem
    assert not started


def broken(folder: Path, name: str) -> None:
    """A model's file `name` becomes something else."""
    file = folder / name
    match name:
        case "model.safetensors":
            file.write_bytes(b"trash")
        case "tokenizer.json":
            file.unlink()
        case "config.json":
            file.write_text("{")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.safetensors", "is no safetensors file"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("config.json", "is no JSON"),
    ],
)
def test_a_folder_that_is_no_model_is_one_sentence(
    started: list[Options], tmp_path: Path, name: str, problem: str
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    assert up("--model", folder, "--drafter", folder).exit_code == 0
    broken(folder, name)
    assert problem in refused("--model", folder)
    assert "neither a draft head nor a model" in refused("--drafter", folder)


@pytest.mark.parametrize("flag", ["--model", "--drafter"])
def test_an_adapter_is_refused_by_name_with_its_model_beside_it_or_without(tmp_path: Path, flag: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter" in refused(flag, folder)
    (folder / "config.json").unlink()
    assert "is a LoRA adapter" in refused(flag, folder)


def test_a_public_draft_head_needs_no_tokenizer(started: list[Options], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps(config))
    model = make_tiny_model(tmp_path / "target")
    assert up("--model", model, "--drafter", folder).exit_code == 0
    (folder / "model.safetensors").write_text("none")
    assert "is no safetensors file" in refused("--drafter", folder)


def test_weights_that_were_broken_off_are_one_sentence(started: list[Options], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert "is broken off" in refused("--model", folder)


def test_a_file_that_is_no_gguf_is_one_sentence(started: list[Options], tmp_path: Path) -> None:
    assert "is no GGUF file" in refused("--model", write(tmp_path / "model.gguf", "trash"))


def test_the_least_kv_memory_holds_what_a_worker_warms_up_with() -> None:
    """Less is refused by the worker as well, but only when the model is loaded."""
    (least,) = bounds.KvTokens.__metadata__
    assert least.ge == WARM_UP_TOKENS


def test_the_example_for_systemd_is_what_up_understands(started: list[Options]) -> None:
    folder = Path(__file__).parents[2] / "deploy" / "systemd"
    assert up("--config", folder / "laps-sd.toml").exit_code == 0
    assert started[0].services["scheduler"] == {"keep_s": 3600}
    unit = (folder / "laps-sd.service").read_text()
    assert "RestartPreventExitStatus=2" in unit  # what `up` ends with where starting again is of no use
