"""The C++ kernels: compiled once for this machine's processor, then loaded from a cache. What they compute is said in
kernels/.

Without a compiler, or if anything about it fails, there are no kernels, and torch computes the same (attention.py).
"""

import ctypes
import functools
import hashlib
import logging
import math
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_SOURCES = Path(__file__).with_name("kernels")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 120.0
_TAIL_CHARS = 2000  # of what the compiler says when it fails

LANES = 16  # floats in a vector of the kernels: sizes that they take are multiples of it
PANEL = 2 * LANES  # outputs of a product that are packed together
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled library; None: there is none, and the log says why."""
    try:
        return ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[-_TAIL_CHARS:]
        reason = f"{error}\n{said}" if said else str(error)
        logging.getLogger(__name__).warning("no native kernels, torch's own take their place: %s", reason)
        return None


def function(name: str, dtype: torch.dtype, *arguments: Any) -> Callable[..., None]:
    """The kernel of this name for weights of this type; `arguments` are the ctypes of its parameters. It runs without
    Python's lock. Raises RuntimeError where there are no kernels."""
    library = kernels()
    if library is None:
        raise RuntimeError("there are no native kernels here")
    found = library[f"{name}_{TYPES[dtype]}"]
    found.argtypes, found.restype = arguments, None
    return found


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on large pages where the system has them: a step that reads all of it then looks up fewer addresses.

    It takes real memory only where it is written. Until then it reads as zeros.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def _library() -> Path:
    """The file of the kernels for this source, these flags and this processor: compiled now if there is none."""
    from platformdirs import user_cache_dir  # not on a machine that has the engine's own libraries alone

    cxx = _compiler()
    if cxx is None:
        raise FileNotFoundError("there is no C++ compiler")
    version = subprocess.run([cxx, "--version"], capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=True).stdout
    flags = " ".join(_FLAGS).encode()
    source = b"".join(path.read_bytes() for path in sorted(_SOURCES.iterdir()))
    key = hashlib.sha256(source + flags + version + _processor())
    library = Path(user_cache_dir("laps-sd")) / "kernels" / f"{key.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # two workers may start at once
            made = Path(folder) / library.name
            subprocess.run(
                [cxx, *_FLAGS, str(_SOURCES / "kernels.cpp"), "-o", str(made)],
                capture_output=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=True,
            )
            made.replace(library)
    return library


def _processor() -> bytes:
    """What `-march=native` depends on: several machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
