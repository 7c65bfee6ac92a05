"""The page's files: all of them in the package, nothing inline, no other host, and the parts that they name exist."""

import re
from importlib.resources import files

import pytest

from gateway.config import Settings
from gateway.page.feed import LONGEST_S
from gateway.page.routes import FILES, POLICY
from protos.v1 import status_pb2
from tests.gateway.page.pages import page

FOLDER = files("gateway.page").joinpath("static")
HTML = FOLDER.joinpath("index.html").read_text()
SCRIPTS = {name: FOLDER.joinpath(name).read_text() for name in FILES if name.endswith(".js")}


def test_every_file_of_the_folder_is_served_and_the_other_way_round() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(FILES)


async def test_each_file_comes_with_its_type_and_the_policy() -> None:
    async with page() as (_, _, _, client):
        for name, kind in FILES.items():
            answer = await client.get("/" if name == "index.html" else f"/page/{name}")
            assert answer.status_code == 200, name
            assert answer.headers["content-type"] == kind
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_allows_this_host_alone() -> None:
    assert POLICY.startswith("default-src 'self';")
    assert "unsafe" not in POLICY


def test_nothing_is_inline() -> None:
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", HTML)
    assert re.findall(r"<script[^>]*>(.*?)</script>", HTML, re.DOTALL) == [""]


@pytest.mark.parametrize("name", FILES)
def test_no_other_host_is_named(name: str) -> None:
    text = FOLDER.joinpath(name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]", text.replace("// ", ""))


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_that_comes_from_outside_becomes_html(name: str) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", SCRIPTS[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_elements_that_a_script_asks_for_exist(name: str) -> None:
    there = set(re.findall(r'\sid="([^"]+)"', HTML))
    assert set(re.findall(r'byId\("([^"]+)"\)', SCRIPTS[name])) <= there


def test_a_feed_that_is_open_may_be_silent_for_as_long_as_a_frame_may_take() -> None:
    (patience_s,) = re.findall(r"const SILENT = (\d+)", SCRIPTS["page.js"])
    questions_s = 2 * Settings.model_fields["rpc_timeout_s"].default
    assert int(patience_s) >= LONGEST_S + questions_s


def test_every_input_has_a_label() -> None:
    labels = set(re.findall(r'<label for="([^"]+)"', HTML))
    inputs = re.findall(r'<(?:input|textarea|select) id="([^"]+)"', HTML)
    assert inputs
    assert set(inputs) <= labels


def test_every_reason_of_the_protocol_has_words() -> None:
    names = {name.removeprefix("WAIT_REASON_").lower() for name in status_pb2.WaitReason.DESCRIPTOR.values_by_name} - {
        "unspecified"
    }
    assert names <= set(re.findall(r"^  (\w+): \(", SCRIPTS["words.js"], re.MULTILINE))
