"""Mutual TLS: which authority is trusted, which certificate is our own, and gRPC credentials made of them. Nothing
about API keys lives here."""

import ssl
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

import grpc
import structlog
from pydantic import Field, PrivateAttr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from protos.errors import Forbidden
from protos.serving import abort
from protos.watched import Watched


class Pem(NamedTuple):
    """The contents of the three files."""

    ca: bytes
    cert: bytes
    key: bytes


class Tls(BaseSettings):
    """Either all three files, or none; without them links are plaintext. `laps-sd certs` makes such files."""

    model_config = SettingsConfigDict(env_prefix="LAPS_SD_TLS_", env_ignore_empty=True, frozen=True)

    ca: Path | None = Field(default=None, description="PEM file: who must have signed the certificates of peers")
    cert: Path | None = Field(default=None, description="PEM file: our certificate, intermediates after it")
    key: Path | None = Field(default=None, description="PEM file: the private key of our certificate")
    _files: "Files | None" = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        if self.ca and self.cert and self.key:
            self._files = Files(self.ca, self.cert, self.key)
        elif self.ca or self.cert or self.key:
            raise ValueError("ca, cert and key belong together: set all three, or none")
        return self

    def __bool__(self) -> bool:
        return self._files is not None

    def expired(self) -> str:
        """A sentence where our certificate has ended: no peer would take it. Empty: it has not."""
        if self.cert is None:
            return ""
        from cryptography import x509  # loads much, and few need it

        try:
            end = x509.load_pem_x509_certificate(self.cert.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            return ""  # OpenSSL has read it, which knows more kinds of PEM
        return f"{self.cert} expired on {end:%Y-%m-%d}: renew it" if end < datetime.now(UTC) else ""

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a channel to a peer, from the files as they are now. None: plaintext."""
        if self._files is None:
            return None
        pem = self._files.read()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a port that accepts only peers with a certificate of the authority. None: plaintext."""
        return None if self._files is None else self._files.server_credentials(mutual=True)

    def ssl_contexts(self) -> Callable[[], ssl.SSLContext] | None:
        """For a server without gRPC that accepts only peers with a certificate of the authority: gives the context for
        a handshake. None: plaintext."""
        return None if self._files is None else self._files.ssl_contexts(mutual=True)


class Files:
    """The three files, read again whenever they change.

    Renewing a certificate replaces two files, and a connection may come between the two. While certificate and key do
    not fit, the last ones that did are used.
    """

    def __init__(self, ca: Path | None, cert: Path, key: Path) -> None:
        """`ca` is None for a port that anybody may connect to. Raises ValueError if the files cannot be used."""
        self._ca, self._cert, self._key = ca, cert, key
        self._pem = Watched(self._all, self._load)

    def read(self) -> Pem:
        """The files as they are now, or the last ones that fitted. Never raises."""
        return self._pem.get()

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Credentials, for one port, that look at the files at every handshake. `mutual`: a client must show a
        certificate that the authority signed."""
        shown = self.read()

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(shown.key, shown.cert)], shown.ca if mutual else None)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """None as long as the files are the same. Whatever else is returned gRPC puts in the place of what another
            handshake may be using at that moment, which has crashed the process."""
            nonlocal shown
            if (pem := self.read()) == shown:
                return None
            shown = pem
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), changed, mutual)

    def ssl_contexts(self, *, mutual: bool) -> Callable[[], ssl.SSLContext]:
        """Gives the context for a handshake, of the files as they are then. `mutual` as in `server_credentials`."""

        def load() -> ssl.SSLContext:
            _, context = self._read()
            if mutual:
                context.verify_mode = ssl.CERT_REQUIRED
            return context

        return Watched(self._all, load).get

    @property
    def _all(self) -> list[Path]:
        return [file for file in (self._ca, self._cert, self._key) if file]

    def _load(self) -> Pem:
        """Raises ValueError."""
        return self._read()[0]

    def _read(self) -> tuple[Pem, ssl.SSLContext]:
        """The files as they are now. Raises ValueError if one cannot be read or is not PEM, or if the key does not
        belong to the certificate."""
        try:
            pem = Pem(self._ca.read_bytes() if self._ca else b"", self._cert.read_bytes(), self._key.read_bytes())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=lambda: "")  # an encrypted key must not ask anybody
            if self._ca:
                context.load_verify_locations(self._ca)
        except ssl.SSLError as error:
            reason = error.reason.lower().replace("_", " ") if error.reason else "no usable PEM"
            raise ValueError(f"{self._cert}, {self._key}: {reason}") from error
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error
        return pem, context


class PeerNames(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is not typed
    """Lets a peer call a service only if its certificate has one of the names listed for that service. A service that
    is not listed accepts any peer.

    So a stolen worker's certificate cannot be used to read prompts through the service of the gateways.
    """

    def __init__(self, names: Mapping[str, Collection[str]]) -> None:
        """`names`: the allowed names, by the full name of the service. An empty list allows any name."""
        self._names = {service: frozenset(allowed) for service, allowed in names.items() if allowed}

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        handler = await continuation(details)
        allowed = self._names.get(details.method.split("/")[1])
        if handler is None or allowed is None:
            return handler
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if many else "unary" for many in streams)
        behaviour = getattr(handler, kind)

        async def call(request, context):  # type: ignore[no-untyped-def]
            names = {name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())}
            if not names & allowed:
                structlog.get_logger().warning("peer_refused", method=details.method, names=sorted(names))
                wanted = " or ".join(sorted(allowed))
                problem = f"your certificate is for {', '.join(sorted(names)) or 'nobody'}; {wanted} may call this"
                await abort(context, Forbidden(problem))
            return await behaviour(request, context)

        return handler._replace(**{kind: call})
