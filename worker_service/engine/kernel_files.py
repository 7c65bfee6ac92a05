"""The kernels as compiled files: where they lie, and how they are compiled. Nothing is loaded here, and torch is not
needed: `python -m worker_service.engine.kernel_files FOLDER` compiles those that an image carries.

An image is built on one machine and runs on others. So it carries one file for each kind of processor, and the best one
that this processor can run is taken. Elsewhere one is compiled for this very processor, and kept in the cache.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CARRIED_VARIABLE = "LAPS_SD_KERNELS"  # names the folder of files that an image carries
CACHE_VARIABLE = "LAPS_SD_CACHE"
_SOURCES = Path(__file__).with_name("kernels")
# The OpenMP runtime may lie beside a file that is carried elsewhere.
_FLAGS = (
    *("-O3", "-fopenmp", "-fPIC", "-shared", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", "-Wl,-rpath,$ORIGIN"),
)
_NATIVE = ("-march=native",)
_COMPILE_TIMEOUT_S = 120.0  # a worker that starts waits no longer
_IMAGE_TIMEOUT_S = 3600.0  # the build of an image does, on a machine that does much else


@dataclass(frozen=True, slots=True)
class Kind:
    """Processors that run the same file. `needs`: what /proc/cpuinfo lists of each of them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
# By the machine's architecture, the best first. On arm64 the compiler's own vectors are all that the kernels use.
KINDS = {
    "x86_64": (
        Kind(
            "x86-64-v4-amx",
            (*_BF16, "-mamx-tile", "-mamx-bf16"),
            _V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
        ),
        Kind("x86-64-v4-bf16", _BF16, _V4 | {"avx512_bf16", "avx512_vnni"}),
        Kind("x86-64-v4", ("-march=x86-64-v4",), _V4),
        Kind("x86-64-v3", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Kind("armv8-a", ("-march=armv8-a",), frozenset({"asimd"})),),
}


def library() -> Path:
    """The file for this processor: one that is carried along, else from the cache, else compiled now. Raises OSError or
    SubprocessError if there is none and none can be compiled."""
    return carried() or _compiled()


def carried() -> Path | None:
    """The best file in the folder that LAPS_SD_KERNELS names; None: there is none of these sources for this
    processor."""
    folder, have = os.environ.get(CARRIED_VARIABLE), set(processor().split())
    for kind in KINDS.get(platform.machine(), ()) if folder else ():
        if kind.needs <= have and (file := Path(str(folder)) / _name(kind)).is_file():
            return file
    return None


def compile_all(folder: Path) -> list[Path]:
    """Files for every kind of processor of this machine's architecture, whichever this machine has. Raises as
    `library`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / _name(kind): kind.flags for kind in KINDS.get(platform.machine(), ())}
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(_compile, _compiler(), flags, file, _IMAGE_TIMEOUT_S) for file, flags in files.items()]
    for each in made:
        each.result()
    return list(files)


def processor() -> str:
    """What `-march=native` depends on: several machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _name(kind: Kind) -> str:
    """A file of other sources or flags has another name: it is never taken for one of these."""
    return f"{kind.name}-{_key(kind.flags)}.so"


def _key(flags: Sequence[str], *further: bytes) -> str:
    source = b"".join(path.read_bytes() for path in sorted(_SOURCES.iterdir()))
    return hashlib.sha256(b"".join((source, " ".join((*_FLAGS, *flags)).encode(), *further))).hexdigest()[:16]


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise FileNotFoundError("there is no C++ compiler")
    return found


def _compiled() -> Path:
    cxx = _compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=True).stdout
    name = f"{_key(_NATIVE, version, processor().encode())}.so"
    file = _cache() / "kernels" / name
    if file.exists():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fits = os.access(file.parent, os.W_OK)
    except OSError:  # a cache that others filled, and that is read-only here
        fits = False
    if not fits:  # nobody else may write there, and nobody finds it again
        file = Path(tempfile.mkdtemp(prefix="laps-sd-kernels-")) / name
    _compile(cxx, _NATIVE, file)
    return file


def _compile(cxx: str, flags: Sequence[str], file: Path, timeout_s: float = _COMPILE_TIMEOUT_S) -> None:
    """The file appears whole: two workers may start at once."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [cxx, *_FLAGS, *flags, str(_SOURCES / "kernels.cpp"), "-o", str(made)]
        subprocess.run(command, capture_output=True, timeout=timeout_s, check=True)
        made.replace(file)


def _cache() -> Path:
    import platformdirs  # the build of an image compiles without any package

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("laps-sd"))


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m worker_service.engine.kernel_files FOLDER")
    try:
        files = compile_all(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr.decode(errors='replace')}")
    except OSError as error:
        sys.exit(str(error))
    sys.stdout.write("".join(f"{file}\n" for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
