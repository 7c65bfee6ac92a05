"""Whether a stack can start with these options on this machine, told before any process is started. Nothing is loaded
that takes long: what the services' own settings say is asked by service_checks.py."""

import os
from pathlib import Path
from shutil import which

from laps_sd.options import Options
from laps_sd.ports import StackError, claim_ports

_GPUS = ("nvidia*", "dxg", "kfd")  # in /dev: NVIDIA's, Windows' in its Linux, AMD's


class Wrong(Exception):
    """`setting`: as somebody would write it, a flag or [SERVICE] NAME; `problem`: a sentence."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting, self.problem = setting, problem


def check_machine(options: Options) -> None:
    """Raises Wrong."""
    if options.devices > 1 and options.workers > 1:
        raise Wrong("--devices", "goes with one worker")
    if options.device == "cuda" and not _has_gpu():
        raise Wrong("--device", "this machine has no CUDA device; use cpu or auto")
    if options.grpc_port and options.grpc_port == options.http_port:
        raise Wrong("--http-port", f"{options.http_port} is --grpc-port already")
    for name in ("grpc_port", "http_port"):
        try:
            claim_ports(getattr(options, name))
        except StackError as error:
            raise Wrong(flag(name), str(error)) from None
    if options.certs is not None and not options.certs.is_dir():
        raise Wrong("--certs", f"{options.certs} is no directory; `laps-sd certs` makes one")
    _check_policy(options)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_policy(options: Options) -> None:
    from scheduler_service.core.policies import make_policy  # the core is light

    try:
        make_policy(options.policy, options.policy_set)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise Wrong(flag(name), problem) from None


def _has_gpu() -> bool:
    """Whether there may be one: the worker, which loads torch, has the last word."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(any(Path("/dev").glob(name)) for name in _GPUS) or which("nvidia-smi") is not None
