"""The machine, and the limits of its memory and arithmetic."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from worker_service.bench.floor import measure

if TYPE_CHECKING:
    from tests.gpu.sections import Section

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "triton", "flashinfer-python", "flash-attn")


def check(section: "Section") -> None:
    section.put(
        python=platform.python_version(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        device=name_of(section.device),
    )
    if section.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(section.device)
        properties = torch.cuda.get_device_properties(section.device)
        section.put(
            cuda=torch.version.cuda,
            capability=list(torch.cuda.get_device_capability(section.device)),
            multiprocessors=properties.multi_processor_count,
            memory_gb=round(total / 1e9, 1),
            free_gb=round(free / 1e9, 1),
        )
    for dtype in (torch.bfloat16, torch.float32):
        machine = measure(section.device, dtype)
        section.put(
            **{
                str(dtype).removeprefix("torch."): {
                    "gb_per_s": round(machine.bytes_per_s / 1e9, 1),
                    "tflop_per_s": round(machine.operations_per_s / 1e12, 2),
                }
            }
        )


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
