"""The distribution for vLLM has all modules that it needs: it loads where nothing else of ours is installed. The test
needs no vLLM, so a module that has moved is missed at once."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADS = """
from importlib import import_module
import sys
for name in ("advice", "asked", "side_by_side", "_core.scheduler_service.predictor.fit"):
    import_module(f"laps_sd_vllm.{name}")
names = {name.partition(".")[0] for name in sys.modules}
assert not names & {"scheduler_service", "worker_service", "protos", "laps_sd"}, names
"""


def test_the_gathered_sources_need_nothing_else_of_ours(tmp_path: Path) -> None:
    gathered = tmp_path / "gathered"
    gather = f"import pathlib, backend; backend.gather(pathlib.Path({str(gathered)!r}))"
    built = subprocess.run([sys.executable, "-c", gather], cwd=ROOT / "deploy" / "vllm", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    elsewhere = os.environ | {"PYTHONPATH": str(gathered)}
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", LOADS], cwd=tmp_path, env=elsewhere, capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr
