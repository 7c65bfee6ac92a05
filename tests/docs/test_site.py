"""The site of the documentation: it builds strictly, and its pages are complete without any other host."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_MADE = re.compile(r"<!-- made by `python -m .*?<!-- end -->", re.DOTALL)
LOADED = {
    ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data"), ("link", "href"),
    ("image", "href"), ("use", "href"), ("form", "action"),
}  # fmt: skip


class Hosts(HTMLParser):
    """What a page names that a browser loads by itself, where that is on another host. Links are for readers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in LOADED and value and value.startswith(("http:", "https:", "//")):
                self.found.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it. With --quiet MkDocs would not count warnings, and --strict would do nothing."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return folder


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        hosts = Hosts()
        hosts.feed(page.read_text())
        assert hosts.found == [], page
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text().replace('"', "").replace("'", ""), sheet


def test_what_the_repository_shows_beside_the_pages_is_part_of_the_site(site: Path) -> None:
    assert (site / "repository" / "SECURITY.html").exists()
    assert (site / "repository" / "protos" / "v1" / "inference.proto").exists()


def test_links_of_the_readme_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text()
    targets = [part.partition(")")[0].partition("#")[0] for part in text.split("](")[1:]]
    ours = [target for target in targets if target and "://" not in target]
    assert len(ours) > 5
    assert [target for target in ours if not (ROOT / target).exists()] == []


def test_the_pages_stay_short() -> None:
    """Words that nobody reads hide those that matter. A page that needs more of them takes others away. Tables that are
    made from the code are looked up, not read."""
    words = {page: len(_MADE.sub("", page.read_text()).split()) for page in (ROOT / "docs").rglob("*.md")}
    assert sum(words.values()) <= 15_000, sorted(words.items(), key=lambda counted: -counted[1])[:5]
    assert len((ROOT / "README.md").read_text().split()) <= 700
