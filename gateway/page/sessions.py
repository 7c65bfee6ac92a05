"""Who may see the page. A browser cannot send a key with a server-sent stream, and a key in a URL ends up in logs: so
the key is given once, for a short-lived signed cookie that opens the page's own paths and nothing else."""

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from gateway.http.access import HttpAccess, host, own_origins
from gateway.keys import Caller, Keys, Right
from protos.errors import Forbidden, Unauthenticated
from protos.settings import is_loopback

COOKIE = "laps_sd_page"
PATH = "/page"
LIFE_S = 900  # of a cookie; every use renews it
ENDED = "-"  # the value of a cookie that the browser is to forget


@dataclass(frozen=True, slots=True)
class Visitor:
    """`cookie`: the renewed value to be set; empty where none is needed."""

    caller: Caller
    cookie: str = ""


class Sessions:
    """The signing key is this process's own: cookies end with it. A key that is revoked ends its cookies, since the
    signature covers its hash as the file has it now."""

    def __init__(self, keys: Keys | None, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._clock = keys, clock
        self._secret = secrets.token_bytes(32)

    @property
    def keyed(self) -> bool:
        """Whether a key is needed."""
        return self._keys is not None

    def visitor(self, request: Request, right: Right = Right.ADMIN) -> Visitor:
        """Who asks, by cookie or by the key in `authorization`. Raises Unauthenticated, Forbidden."""
        access: HttpAccess = request.app.state.access
        if self._keys is None:
            _refuse_names(request)
            return Visitor(access.admit(request.headers, right))
        if "authorization" in request.headers:
            return Visitor(access.admit(request.headers, right))
        id = self._signed(request.cookies.get(COOKIE, ""))
        return Visitor(_with(right, self._keys.entry(id).caller), self._cookie(id))

    def login(self, key: str) -> str:
        """The cookie for the owner of this key. Raises Unauthenticated, Forbidden."""
        if self._keys is None:
            return ""
        _with(Right.ADMIN, self._keys.caller(f"Bearer {key}"))
        return self._cookie(key.split("_")[1])

    def _cookie(self, id: str) -> str:
        until = int(self._clock()) + LIFE_S
        return f"{id}.{until}.{self._mac(id, until)}"

    def _signed(self, cookie: str) -> str:
        """The id of the key that the cookie was given for. Raises Unauthenticated."""
        id, _, rest = cookie.partition(".")
        until, _, mac = rest.partition(".")
        if not (until.isascii() and until.isdecimal() and len(until) < 16 and int(until) > self._clock()):
            raise Unauthenticated("log in: this page needs an API key with the right admin")
        if not hmac.compare_digest(mac.encode(), self._mac(id, int(until)).encode()):
            raise Unauthenticated("log in: the key is unknown, or no longer valid")
        return id

    def _mac(self, id: str, until: int) -> str:
        assert self._keys is not None
        words = f"{id}.{until}.{self._keys.entry(id).sha256}"
        return hmac.new(self._secret, words.encode(), "sha256").hexdigest()


def set_cookie(request: Request, value: str) -> list[tuple[bytes, bytes]]:
    """The header that sets the cookie; an empty `value`: none; ENDED: it is to be forgotten."""
    if not value:
        return []
    # A proxy may have ended TLS. Browsers tell where a page comes from over TLS alone, but for this machine's own.
    by_proxy = "sec-fetch-site" in request.headers and not is_loopback(host(request.headers))
    secure = "; Secure" if request.url.scheme == "https" or by_proxy else ""
    # Without a path of its own it goes where this answer came from, which a proxy may have put under another path: to
    # the page's addresses, never to /v1.
    attributes = f"Max-Age={0 if value == ENDED else LIFE_S}; HttpOnly; SameSite=Strict{secure}"
    return [(b"set-cookie", f"{COOKIE}={value}; {attributes}".encode())]


def same_origin(request: Request) -> None:
    """Raises Forbidden if another site's page sent this. Browsers send JSON to a foreign site only after asking it,
    and tell where a page comes from; other programs do not, and need not."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    json = request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"
    if site != "same-origin" or not json:
        raise Forbidden("only the page itself may send this, as application/json")
    if origin not in (None, *own_origins(request.headers)):
        raise Forbidden("only the page itself may send this: a proxy before it has to pass on the header Host")


def _with(right: Right, who: Caller) -> Caller:
    """Raises Forbidden."""
    if right not in who.rights:
        raise Forbidden(f"the key needs the right {right}")
    return who


def _refuse_names(request: Request) -> None:
    """Without keys the page is for this machine. A site whose name leads here (DNS rebinding) could read it otherwise.
    Raises Forbidden."""
    if not is_loopback(host(request.headers)):
        raise Forbidden("without keys this page is shown at 127.0.0.1 and localhost alone: set --api-keys")
