"""`python -m tests.gpu`: sections in turn, each in a process of its own with a deadline; one JSON, one table.

What a section found is in the JSON as soon as it found it: one that hangs, dies or takes too long loses only the rest
of its own.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import report
from tests.gpu.plan import PLANS, Plan, Size

_ROOT = Path(__file__).parents[2]
_POLL_S = 0.2


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--size", choices=PLANS, default="full", help="smallest: the same in little, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="a folder")
    parser.add_argument("--sections", default="", help="only these, with commas")
    parser.add_argument("--minutes", type=float, default=0.0, help="in all; default: as the size says")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # of a child
    told = parser.parse_args(words)
    size = PLANS[told.size]
    if told.section:
        _be(told.section, told.device, size, told.out)
        return 0
    chosen = [each for each in size.plans if not told.sections or each.section in told.sections.split(",")]
    if not chosen:
        parser.error(f"--sections: none of {', '.join(each.section for each in size.plans)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a section under way ends with us, and what it found stays
    return run(told.device, told.size, chosen, told.out, 60 * (told.minutes or size.minutes))


def run(device: str, size: str, plans: Sequence[Plan], out: Path, seconds: float) -> int:
    """Returns 0 where every section ended and found nothing wrong. `seconds`: for all of them."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    found: dict[str, Any] = {"size": size, "asked_device": device, "sections": {}}
    for plan in plans:
        left = min(plan.seconds, end - time.monotonic())

        def keep(section: dict[str, Any], name: str = plan.section) -> None:
            found["sections"][name] = section
            _write(out / "gpu-check.json", found)
            _write_text(out / "gpu-check.txt", report.table(found))

        keep({"state": "no time was left"} if left < plan.least_s else {"state": "running"})
        if left >= plan.least_s:
            _section(plan, device, size, left, out, keep)
        sys.stdout.write(report.line(plan.section, found["sections"][plan.section]) + "\n")
        sys.stdout.flush()
    sys.stdout.write(report.table(found))
    return 0 if report.good(found) else 1


def _section(
    plan: Plan, device: str, size: str, seconds: float, out: Path, keep: Callable[[dict[str, Any]], None]
) -> None:
    """A child in a session of its own, whose results are read from a file as they come. What it said is kept where
    something is wrong: a lent machine gives back few files."""
    begun, said = time.monotonic(), out / f"{plan.section}.log"
    with tempfile.TemporaryDirectory() as folder, said.open("wb") as log:
        words = [sys.executable, "-m", "tests.gpu", "--section", plan.section, "--device", device, "--size", size]
        # The child stops by itself a little earlier, so that what it knows is whole.
        environment = os.environ | {"GPU_CHECK_SECONDS": str(seconds - plan.least_s / 2), "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(
            [*words, "--out", folder], cwd=_ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        state, found = "running", dict[str, Any]()
        try:
            while state == "running":
                time.sleep(_POLL_S)
                if (code := child.poll()) is not None:
                    state = "ended" if code == 0 else f"failed with {code}"
                elif time.monotonic() - begun > seconds:
                    state = "was stopped: its time was over"
                found = _read(Path(folder)) | {"state": state, "seconds": round(time.monotonic() - begun, 1)}
                keep(found)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if state == "ended" and not found.get("wrong"):
        said.unlink()
    else:
        keep(found | {"log": said.read_bytes()[-3000:].decode(errors="replace")})


def _be(section: str, device: str, size: Size, folder: Path) -> None:
    """The child: everything that takes time is imported here."""
    from tests.gpu.sections import SECTIONS, Section

    seconds = float(os.environ.get("GPU_CHECK_SECONDS", "600"))
    results = Section(device, size, seconds, lambda found: _write(folder / "found.json", found))
    SECTIONS[section](results)


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, found: dict[str, Any]) -> None:
    _write_text(path, json.dumps(found, indent=1, default=str) + "\n")


def _write_text(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
