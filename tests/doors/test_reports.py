"""Reports in a real browser, on a telephone and on a screen, in the light and in the dark: nothing is cut off, and all
text can be read."""

import asyncio
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from laps_sd.loadtest import report
from laps_sd.loadtest.record import Record
from laps_sd.loadtest.results import summarise
from scheduler_service.core.policies import POLICIES
from scheduler_service.sim import report as simulated
from scheduler_service.sim.generate import generate, parse_synthetic
from scheduler_service.sim.results import summarise as summarise_trace
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet

BROWSER_S = 120.0
FACTS = {
    "model": "smollm2-135m",
    "policy": "gittins",
    "machine": "EPYC, 2 cores",
    "command": "laps-sd x " + "word " * 40,
}
# What a person could see, written into the title of the page around it: no window is as narrow as a telephone, a frame
# is.
LOOK = """<script>
const seen = () => {
  const edge = document.body.getBoundingClientRect().right;
  const p99 = [...document.querySelectorAll("th")].find((cell) => cell.textContent === "p99");
  const sizes = [...document.querySelectorAll("svg text")].map((text) => text.getBoundingClientRect().height);
  const [back, fore] = ["backgroundColor", "color"].map((name) => getComputedStyle(document.documentElement)[name]);
  return {width: innerWidth, page: document.documentElement.scrollWidth, edge, p99: p99.getBoundingClientRect().right,
          least: Math.min(...sizes), back, fore, label: getComputedStyle(document.querySelector("svg text")).fill};
};
parent.document.title = JSON.stringify(seen());
</script></body>"""


def load_test() -> str:
    def record(i: int) -> Record:
        outputs = [(i + 0.5 * n, 1) for n in range(1, 2 + 7 * i)]
        return Record(
            i, due_s=i, free_s=i, sent_s=i, end_s=9.0 + 3 * i, outputs=outputs, category="chat", output_tokens=i
        )

    records = [record(i) for i in range(1, 30)]
    return report.render(FACTS, summarise(records, {}, ours=True), records, [])


def simulation() -> str:
    fleet = SimFleet()
    jobs = generate(parse_synthetic("requests=40,load=0.9"), 0, fleet)
    traces = {name: simulate(jobs, POLICIES[name](), fleet) for name in ("fcfs", "las", "gittins")}
    return simulated.render(FACTS, {name: summarise_trace(trace) for name, trace in traces.items()}, traces)


async def look(page: str, folder: Path, *flags: str, width: int = 1000) -> dict[str, Any]:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    file = folder / "page.html"
    framed = html.escape(page.replace("</body>", LOOK))
    file.write_text(f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{framed}"></iframe>')
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, "--dump-dom", file.as_uri(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), BROWSER_S)
    finally:
        if process.returncode is None:
            process.kill()
    found = re.search(r"<title>(\{.*?\})</title>", said.decode())
    assert found, said.decode()[-500:]
    seen: dict[str, Any] = json.loads(found[1])
    return seen


@pytest.mark.parametrize("page", [load_test, simulation])
@pytest.mark.parametrize("width", [420, 1000])
async def test_nothing_is_cut_off_and_text_can_be_read(page: Any, width: int, tmp_path: Path) -> None:
    seen = await look(page(), tmp_path, "--window-size=1400,1000", width=width)
    assert seen["page"] <= seen["width"] == width
    assert seen["p99"] <= seen["edge"]
    assert seen["least"] >= 8  # pixels of a line


async def test_plots_have_the_colour_of_the_text_around_them(tmp_path: Path) -> None:
    light = await look(load_test(), tmp_path, "--blink-settings=preferredColorScheme=1")
    dark = await look(load_test(), tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["label"] == light["fore"] == "rgb(0, 0, 0)"
    assert dark["label"] == dark["fore"] == "rgb(255, 255, 255)"
