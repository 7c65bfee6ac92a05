"""A worker tells of its model's chat template, in whichever way the files have it."""

import json
from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model
from worker_service.models import load
from worker_service.wire import of_model

DEFAULT, TOOLS = {"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}


@pytest.mark.parametrize(
    ("said", "told"),
    [("one", "one"), ([TOOLS, DEFAULT], "one"), ([TOOLS], ""), (5, ""), (None, "")],
    ids=["one", "several", "none of them the default", "a number", "none"],
)
def test_of_several_chat_templates_the_default_is_told(said: object, told: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": said}))
    assert of_model(load(str(folder), "cpu", "float32"), 64, 100).chat_template == told
