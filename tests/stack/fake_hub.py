"""A hub of models on loopback. It speaks the part of the Hugging Face hub's HTTP that `huggingface_hub` 2.4 uses: model
info, the list of files, and files with ETag, X-Repo-Commit and byte ranges."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`repositories`: files by name, by OWNER/NAME. `refusals`: status and X-Error-Code instead of an answer, by
    OWNER/NAME. `breaks_at`: after so many bytes of a file of that name the connection ends, and the file is not to be
    had any more. `ranges`: the Range header of each download, empty where a whole file was asked for. `xet`: names of
    files that are said to be in Xet, too."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    breaks_at: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    ranges: dict[str, list[str]] = field(default_factory=dict)
    xet: set[str] = field(default_factory=set)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serves until the block ends."""
    hub = FakeHub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append(f"{self.command} {path}")
        match path.strip("/").split("/"):
            case ["api", "models", owner, name, *rest]:
                if (files := self._files(f"{owner}/{name}", rest[1] if len(rest) > 1 else "main")) is not None:
                    self._about(f"{owner}/{name}", files, tree=rest[:1] == ["tree"])
            case [owner, name, "resolve", revision, *file]:
                if (files := self._files(f"{owner}/{name}", revision)) is not None:
                    self._file("/".join(file), files)
            case _:
                self._refuse(404, "")

    def _files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """None: it was refused."""
        if refusal := self.served.refusals.get(repository):
            self._refuse(*refusal)
        elif repository not in self.served.repositories:
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return self.served.repositories[repository]
        return None

    def _about(self, repository: str, files: dict[str, bytes], *, tree: bool) -> None:
        rows = [{"path": name, "size": len(data), "oid": etag(data), "type": "file"} for name, data in files.items()]
        siblings = [{"rfilename": row["path"], "size": row["size"], "blobId": row["oid"]} for row in rows]
        body = json.dumps(rows if tree else {"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _file(self, name: str, files: dict[str, bytes]) -> None:
        if name not in files or name in self.served.gone:
            return self._refuse(*((503, "") if name in files else (404, "EntryNotFound")))
        data = files[name]
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.served.xet:
            headers |= {"X-Xet-Hash": etag(data), "X-Xet-Refresh-Route": "/xet"}
        if self.command == "HEAD":
            return self._head(200, len(data), headers)
        wanted = self.headers.get("Range", "")
        self.served.ranges.setdefault(name, []).append(wanted)
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if wanted else 200, len(data) - start, headers)
        if (bound := self.served.breaks_at.pop(name, None)) is not None:
            self.served.gone.add(name)
            self.wfile.write(data[start:bound])
            self.close_connection = True
            return None
        self.wfile.write(data[start:])
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, 0, {"X-Error-Code": code} if code else {})

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
