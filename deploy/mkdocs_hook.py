"""A hook of MkDocs: what pages link to outside docs/ (SECURITY.md, .proto files, ...) becomes part of the site, under
repository/. So one link is right in the repository and on the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SHOWN = (
    "SECURITY.md",
    "tests/README.md",
    "protos/v1/*.proto",
    "protos/oip/*.proto",
    "examples/*",
    "docker-compose.yml",
)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(file for pattern in SHOWN for file in ROOT.glob(pattern) if file.is_file()):
        uri = f"repository/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are resolved in the repository, then told as the site has them."""
    here = posixpath.dirname(_in_repository(page.file.src_uri))

    def there(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, found[1]))
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        return posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(there, markdown)


def _in_repository(uri: str) -> str:
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
