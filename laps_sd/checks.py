"""Whether a stack can start with these options on this machine, told before any process is started. Nothing is loaded
that takes long: what the services' own settings say is asked by service_checks.py."""

import os
from pathlib import Path
from shutil import which

from laps_sd.options import DRAFTERS, REMOTE, Options
from laps_sd.ports import StackError, claim_ports

# Options of our own engine, and what stands for them where vLLM is the engine.
_NOT_OF_VLLM = {
    "device": "vLLM takes the device that it was built for",
    "devices": "with vLLM say --vllm-args '{\"tensor_parallel_size\": N}'",
    "stages": "vLLM has its own way to spread a model",
    "host_kv_tokens": "vLLM keeps KV on the device alone",
    "weights": "vLLM keeps what the checkpoint has",
    "pace": "vLLM runs as fast as it can",
    "drafters": "vLLM drafts in its own process",
}
_GPUS = ("nvidia*", "dxg", "kfd")  # in /dev: NVIDIA's, Windows' in its Linux, AMD's


class Wrong(Exception):
    """`setting`: as somebody would write it, a flag or [SERVICE] NAME; `problem`: a sentence."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting, self.problem = setting, problem


def check_worker(options: Options) -> None:
    """The settings of a worker alone. Raises Wrong."""
    if options.device == "cuda" and not _has_gpu():
        raise Wrong("--device", "this machine has no CUDA device; use cpu or auto")
    if options.engine != "vllm" and (options.vllm_python is not None or options.vllm_args is not None):
        raise Wrong("--engine", "must be vllm, where --vllm-python or --vllm-args is given")
    if options.certs is not None and not options.certs.is_dir():
        raise Wrong("--certs", f"{options.certs} is no directory; `laps-sd certs` makes one")
    _check_model(options.model)
    if options.weights != "auto" and options.engine == "own" and options.processes > 1:
        raise Wrong("--weights", f"{options.weights} is of one process alone; leave out --devices and --stages")
    if options.devices > 1 and options.engine == "own":
        _check_shares(options.model, options.devices)
    if options.stages > 1 and options.engine == "own":
        _check_layers(options.model, options.stages)
    if options.drafter not in DRAFTERS and not options.drafter.startswith(REMOTE):
        _check_drafter(Path(options.drafter), options.stages)
    if options.engine == "vllm":
        _check_vllm(options)


def check_machine(options: Options) -> None:
    """Raises Wrong. Ports come last: that one is taken is no fault of the settings."""
    if options.devices > 1 and options.workers > 1:
        raise Wrong("--devices", "goes with one worker")
    if options.stages > 1 and options.workers > 1:
        raise Wrong("--stages", "goes with one worker")
    if options.stages > 1 and options.devices > 1:
        raise Wrong("--stages", "spreads a model by layers, --devices by heads: take one of them")
    if options.grpc_port and options.grpc_port == options.http_port:
        raise Wrong("--http-port", f"{options.http_port} is --grpc-port already")
    file = options.metrics_targets
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise Wrong("--metrics-targets", f"{file} cannot be written")
    if (folder := options.data_dir) is not None and folder.exists() and not folder.is_dir():
        raise Wrong("--data-dir", f"{folder} is no directory")
    if options.redis is not None:
        _check_redis(options.redis)
    elif options.services.get("scheduler", {}).get("redis_replicas"):
        raise Wrong("[scheduler] redis_replicas", "is of a Redis of your own: name it with --redis")
    _check_policy(options)
    check_worker(options)
    _check_drafters(options)
    for name in ("grpc_port", "http_port"):
        try:
            claim_ports(getattr(options, name))
        except StackError as error:
            raise Wrong(flag(name), str(error)) from None


def _check_vllm(options: Options) -> None:
    """Behind the quick ones: another interpreter is asked, which takes a second."""
    from laps_sd.vllm_python import UnusableArgsError, UnusableError, check

    for name, hint in _NOT_OF_VLLM.items():
        if getattr(options, name) != Options.__dataclass_fields__[name].default:
            raise Wrong(flag(name), f"is for our own engine; {hint}")
    if options.vllm_python is None:
        raise Wrong("--vllm-python", "name the interpreter of the environment that vLLM is installed in")
    try:
        check(options.vllm_python, options.vllm_args)
    except UnusableArgsError as error:
        raise Wrong("--vllm-args", str(error)) from None
    except UnusableError as error:
        raise Wrong("--vllm-python", str(error)) from None


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_policy(options: Options) -> None:
    from scheduler_service.core.policies import make_policy  # the core is light

    try:
        make_policy(options.policy, options.policy_set)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise Wrong(flag(name), problem) from None


def _check_drafters(options: Options) -> None:
    if not options.drafters:
        if options.drafter_model is not None:
            raise Wrong("--drafter-model", "is that of --drafters, of which there are none")
        return
    if options.drafter != Options.__dataclass_fields__["drafter"].default:
        raise Wrong("--drafter", "follows from --drafters: leave one of them out")
    if options.drafter_model is None:
        raise Wrong("--drafter-model", "name the small model that --drafters run")
    _check_model(options.drafter_model, "--drafter-model")


def _check_model(model: str, setting: str = "--model") -> None:
    """What a folder or a file shows at once. Whether a model of a hub is there, and what can be served, comes later."""
    from worker_service.catalogue import CATALOGUE  # these are light
    from worker_service.hub import parse_name
    from worker_service.model_files import ModelError, at_home, check_files

    try:
        path = at_home(model)
        if path.is_dir() and model not in CATALOGUE:
            check_files(path)
        elif path.is_file() and (path.suffix != ".gguf" or path.open("rb").read(4) != b"GGUF"):
            raise ModelError(f"{path} is no GGUF file")
        elif not path.exists() and model not in CATALOGUE and parse_name(model) is None:
            raise ModelError(f"{model!r} does not exist, and is neither {', '.join(CATALOGUE)} nor OWNER/NAME of a hub")
    except (ModelError, OSError) as error:
        raise Wrong(setting, str(error)) from None


def _check_redis(url: str) -> None:
    from laps_sd.redis_server import NoServer, check_reachable

    try:
        check_reachable(url)
    except NoServer as error:
        raise Wrong("--redis", str(error)) from None


def _check_shares(model: str, devices: int) -> None:
    """Whether the devices can share the model's heads of keys and values, as far as that is known before the model is
    there."""
    from worker_service.catalogue import CATALOGUE  # these are light
    from worker_service.model_files import at_home, kv_heads

    path = at_home(model)
    heads = CATALOGUE[model].kv_heads if model in CATALOGUE else kv_heads(path) if path.is_dir() else None
    if heads is not None and heads % devices:
        raise Wrong("--devices", f"{devices} devices cannot share the {heads} heads of keys and values of {model}")


def _check_layers(model: str, stages: int) -> None:
    """As _check_shares, of layers."""
    from worker_service.catalogue import CATALOGUE
    from worker_service.model_files import at_home, layers

    path = at_home(model)
    found = CATALOGUE[model].layers if model in CATALOGUE else layers(path) if path.is_dir() else None
    if found is not None and found < stages:
        raise Wrong("--stages", f"{stages} stages are more than the {found} layers of {model}")


def _check_drafter(folder: Path, stages: int) -> None:
    """A draft head, ours or an EAGLE one, or a small model, for a model over so many stages."""
    from worker_service.model_files import ModelError, check_files, check_weights, is_eagle

    try:
        if (folder / "head.json").is_file():
            check_weights(folder / "head.safetensors")
        elif is_eagle(folder):
            if stages > 1:
                raise Wrong("--drafter", "an EAGLE-3 head reads layers of which other --stages know: take another one")
            for file in folder.glob("*.safetensors"):  # older ones are no safetensors: the worker reads them
                check_weights(file)
        else:
            check_files(folder)
    except ModelError as error:
        raise Wrong("--drafter", f"neither a draft head nor a model: {error}") from None


def _has_gpu() -> bool:
    """Whether there may be one: the worker, which loads torch, has the last word."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(any(Path("/dev").glob(name)) for name in _GPUS) or which("nvidia-smi") is not None
