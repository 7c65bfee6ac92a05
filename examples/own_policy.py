"""An order of service of your own: a long prompt counts as a later arrival, by a minute at most.

Beside first come, first served, in the simulator:  python examples/own_policy.py
Live:  PYTHONPATH=examples laps-sd up --policy own_policy.ShortPrompts --policy-set patience_s=30
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class ShortPrompts(Policy):
    preemptive: ClassVar[bool] = False  # a request that runs is never paused
    asks: ClassVar[bool] = False  # it needs no prediction of output lengths

    patience_s: float = 60.0  # a setting: `--policy-set patience_s=...`

    def claim(self, view: View, round_s: float) -> Claim:
        """The lowest goes first; `arrival` is in seconds."""
        request = view.request
        return Claim(level=1, tier=0, key=request.arrival + min(self.patience_s, request.prompt_tokens / 10))


if __name__ == "__main__":
    command = ["simulate", "--workload", "synthetic:requests=300,load=0.9", "--policy", "fcfs,own_policy.ShortPrompts"]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    sys.exit(
        subprocess.run([sys.executable, "-m", "laps_sd", *command], env=os.environ | {"PYTHONPATH": paths}).returncode
    )
