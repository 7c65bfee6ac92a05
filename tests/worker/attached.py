"""A worker's end of drafting apart, attached to a drafter of the tests in a process of its own. No test lives here."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from worker_service.draft_post import LinkPost
from worker_service.engine.drafting.remote_drafter import RemoteDrafter

NOBODY = "127.0.0.1:1"
START_S = 60.0


@contextmanager
def process(module: str, settings: Mapping[str, Any], texts: Any) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`python -m MODULE SETTINGS`, which prints its address. The setting `texts` becomes the path of a file with
    `texts`."""
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "texts.json"
        file.write_text(json.dumps(texts))
        command = [sys.executable, "-m", module, json.dumps({**settings, "texts": str(file)})]
        running = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(running.kill)
        assert running.stdout is not None
        yield running.stdout.readline().strip(), running


@contextmanager
def attached(address: str, kind: type[RemoteDrafter] = RemoteDrafter) -> Iterator[RemoteDrafter]:
    """Once it has said that it is there; at NOBODY it never does."""
    post = LinkPost({"drafters": [address], "names": [], "tls": {}, "worker_id": "test", "vocabulary": ""})
    try:
        remote, deadline = kind(post, os.urandom(32)), time.monotonic() + START_S
        while address != NOBODY and remote._welcome is None:
            assert time.monotonic() < deadline, "the drafter does not come"
            remote._read(0.2)
        yield remote
    finally:
        post.close()
