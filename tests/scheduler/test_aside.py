"""Processes of low priority have it before they import anything of their own."""

import os
import subprocess
from pathlib import Path

from scheduler_service.aside import aside


def test_the_module_is_imported_at_low_priority(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("import os, sys\nprint(os.nice(0), __name__, len(sys.argv))")
    told = subprocess.run(aside("told", 3), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(min(19, os.nice(0) + 3)), "__main__", "1"]
