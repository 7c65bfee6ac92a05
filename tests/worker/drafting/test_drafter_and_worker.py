"""A worker's engine and a real drafter in its own process, on the same tiny model: the text is that of no drafter, and
the drafts are good ones."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from laps_sd.ports import claim_ports
from tests.worker.harness import Driver, Tiny
from tests.worker.test_apart import GREEDY, LEAST_SHARE, SAMPLED, Apart, admit_all
from worker_service.draft_post import LinkPost
from worker_service.drafters import vocabulary_digest
from worker_service.engine.drafting.drafter import FirstOf, NoDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.drafting.remote_drafter import RemoteDrafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.types import Sampling


@pytest.fixture(scope="module")
def address(tiny: Tiny) -> Iterator[str]:
    port = claim_ports(0)[0]
    command = [sys.executable, "-m", "worker_service.drafting", "--model", str(tiny.folder), "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--kv-tokens", "4096"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while json.loads(process.stderr.readline())["event"] != "ready":
            pass
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.communicate()


class Real(Apart):
    def __post_init__(self) -> None:
        told = {"names": [], "tls": {}, "worker_id": "test", "vocabulary": vocabulary_digest(self.tiny.tokenizer)}
        self.post = LinkPost({"drafters": [self.address], **told})
        self.remote = RemoteDrafter(self.post, b"key")
        self.driver = Driver(self.tiny.engine(drafter=FirstOf(Shielded(self.remote), NgramDrafter())))
        admit_all(self.driver, self.tiny, self.sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_real_drafters_guesses_are_taken_and_change_no_token(tiny: Tiny, address: str, sampling: Sampling) -> None:
    alone = Driver(tiny.engine(drafter=NoDrafter()))
    admit_all(alone, tiny, sampling)
    alone.finish_all()
    real = Real(tiny, sampling, address)
    try:
        assert real.share(rounds=8) >= LEAST_SHARE
        rows = real.driver.rows
        if sampling is GREEDY:  # the drafter is the target
            assert sum(row.accepted for row in rows) > 0.8 * sum(row.drafted for row in rows)
        real.finish()
        assert real.driver.outputs == alone.outputs
    finally:
        real.post.close()
