"""The families of tests/families on the device, several at once."""

import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tests.families.table import FAMILIES

if TYPE_CHECKING:
    from tests.families.check import Verdict
    from tests.gpu.sections import Section


def check(section: "Section") -> None:
    names = section.size.families or tuple(FAMILIES)
    counts: Counter[str] = Counter()
    section.put(families=len(names), works=0)
    if section.size.jobs == 1:
        for name in names:
            _keep(section, counts, name, _judge(name, str(section.device)))
        section.put(done=True)
        return
    # Processes of their own that begin afresh: a fork of one that has used CUDA cannot.
    with ProcessPoolExecutor(section.size.jobs, mp_context=get_context("spawn")) as pool:
        asked = {pool.submit(_judge, name, str(section.device)): name for name in names}
        try:
            for future in as_completed(asked, timeout=max(section.left_s, 1)):
                _keep(section, counts, asked[future], future.result())
        except TimeoutError:
            section.put(stopped=f"time was short: {len(names) - counts.total()} were not tried")
            pool.shutdown(wait=False, cancel_futures=True)
            return
    section.put(done=True)


def _judge(name: str, device: str) -> "Verdict":
    import torch
    from transformers.utils import logging

    from tests.families.check import judge

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        return judge(name, Path(folder), device)


def _keep(section: "Section", counts: Counter[str], name: str, verdict: "Verdict") -> None:
    counts[verdict.word] += 1
    section.add("rows", {"family": name, **verdict._asdict()})
    section.put(**{word: counts[word] for word in counts})
    expected = "refused" if FAMILIES[name].refused else "works"
    if verdict.word != expected:
        section.wrong(f"{name}: {verdict.word}, not {expected}: {verdict.note[:300]}")
