"""The C++ kernels, loaded for this machine's processor; kernel_files.py finds their file. What they compute is said in
kernels/.

Without a file, or if anything about it fails, there are no kernels, and torch computes the same (attention.py).
"""

import ctypes
import functools
import logging
import math
import mmap
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from worker_service.engine import kernel_files

_log = logging.getLogger(__name__)
_TAIL_CHARS = 2000  # of what the compiler says when it fails
_TILES = "amx_bf16"  # in /proc/cpuinfo: kernels/tiles.h

LANES = 16  # floats in the widest vector of the kernels: sizes that they take are multiples of it, on every processor
PANEL = 32  # outputs of a product that are packed together
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled library; None: there is none, and the log says why."""
    try:
        library = ctypes.CDLL(str(kernel_files.library()))
        if _TILES in kernel_files.processor().split() and not library.tiles():
            _log.warning("this processor has %s, but the system or the compiler keeps kernels from it", _TILES)
        return library
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[-_TAIL_CHARS:]
        reason = f"{error}\n{said}" if said else str(error)
        _log.warning("no native kernels, torch's own take their place: %s", reason)
        return None


def has_tiles() -> bool:
    """Whether products of whole bfloat16 weights are taken in tiles."""
    library = kernels()
    return library is not None and bool(library.tiles())


def function(name: str, dtype: torch.dtype, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """The kernel of this name for numbers of this type. `arguments` are the ctypes of its parameters, `result` of
    what it returns. It runs without Python's lock. Raises RuntimeError where there are no kernels."""
    library = kernels()
    if library is None:
        raise RuntimeError("there are no native kernels here")
    found = library[f"{name}_{TYPES[dtype]}"]
    found.argtypes, found.restype = arguments, result
    return found


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on large pages where the system has them: a step that reads all of it then looks up fewer addresses.

    It takes real memory only where it is written. Until then it reads as zeros.
    """
    # Private: Linux gives shared memory, which is Python's default, no large pages.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
