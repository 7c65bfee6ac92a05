"""Which server is asked, and what may be told to it: addresses, key, certificates. Everything wrong is a BadInput at
once, before anything is sent."""

import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from laps_sd.client.wire import BadInput, is_loopback

HTTPS = "https://"
DEFAULT_SERVER = "127.0.0.1:50051"
SERVER_VARIABLE, KEY_VARIABLE, CA_VARIABLE = "LAPS_SD_SERVER", "LAPS_SD_API_KEY", "LAPS_SD_CA"
MAX_PORT = 65535
_ADDRESS = re.compile(r"(?P<host>[^\s:,/\[\]]+|\[[^\s,/\[\]]+\]):(?P<port>\d+)")


@dataclass(frozen=True, slots=True)
class Server:
    """One gateway or several of one service. `tls`: whether connections are encrypted; `ca`: PEM of the authorities
    that are trusted, None: the public ones."""

    targets: tuple[str, ...]
    tls: bool
    ca: bytes | None = field(repr=False)
    ca_name: str
    api_key: str | None = field(repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key is not None else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext."""
        return grpc.ssl_channel_credentials(self.ca) if self.tls else None

    def ssl_context(self) -> ssl.SSLContext:
        """What Python's own TLS needs to trust the same authorities."""
        return ssl.create_default_context(cadata=self.ca.decode() if self.ca else None)


def find_server(server: str | None, api_key: str | None, ca: str | os.PathLike[str] | None) -> Server:
    """The server that was given; otherwise the one that the environment names; otherwise this machine's default port.
    So, too, the key and the authority, but no default; "" of these: none, whatever the environment names. Raises
    BadInput."""
    named = server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    trusted = os.environ.get(CA_VARIABLE, "") if ca is None else ca
    tls = bool(trusted) or named.startswith(HTTPS)
    targets = tuple(named.removeprefix(HTTPS).split(","))
    for target in targets:
        check_address(target)
    key = (os.environ.get(KEY_VARIABLE) if api_key is None else api_key) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise BadInput("api_key", "must be printable ASCII")
    far = [one for one in targets if not is_loopback(one.rpartition(":")[0])]
    if key is not None and not tls and far:
        raise BadInput("api_key", f"{far[0]} is another machine: use https:// or name its ca")
    return Server(targets, tls, read_ca(Path(trusted)) if trusted else None, str(trusted), key)


def check_address(target: str) -> None:
    """Raises BadInput."""
    if (match := _ADDRESS.fullmatch(target)) is None:
        raise BadInput("server", f"{target!r} is not HOST:PORT, nor several of them with commas between")
    if not 1 <= int(match["port"]) <= MAX_PORT:
        raise BadInput("server", f"{target}: the port must be from 1 to {MAX_PORT}")


def read_ca(file: Path) -> bytes:
    """The certificates in the file, as ASCII. Raises BadInput."""
    try:
        pem = file.read_bytes()
    except OSError as error:
        raise BadInput("ca", f"{file} cannot be read: {error.strerror}") from error
    try:
        certificates = pem.decode("ascii", "ignore")  # what else there is are comments
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates)
    except (ssl.SSLError, ValueError) as error:  # ValueError: an empty file
        raise BadInput("ca", f"{file} is no PEM file of certificates") from error
    return certificates.encode()
