"""LAPS-SD inside vLLM: a scheduler that orders requests by the work that each still needs. The scheduler loads only
when vLLM asks for it, so that whoever reads a version or a setting needs no vLLM."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "LapsSdScheduler":
        from laps_sd_vllm.plugin import LapsSdScheduler

        return LapsSdScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
