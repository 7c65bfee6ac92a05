"""Why a server could not be reached, in a sentence: a connection is tried by hand, since gRPC says only that its own
failed. Nothing but a TLS handshake and the request `GET /` is sent."""

import os
import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from laps_sd.client.server import Server
from laps_sd.client.wire import is_loopback

PROBE_S = 1.0  # of connecting, and of the handshake
# In OpenSSL's words for what the other side said, in TLS; it has words for all its own errors, not for all alerts.
ALERTS = " alert ", "tlsv1 ", "unknown error"
GRPC = ["h2"]  # what TLS is asked to carry
PROXIES = "grpc_proxy", "https_proxy", "http_proxy"  # the first that is set counts


@dataclass(frozen=True, slots=True)
class Cause:
    """`passing`: waiting may help, since the server may still be starting."""

    words: str
    passing: bool = True


def by_proxy(target: str) -> bool:
    """Whether gRPC goes there through the HTTP proxy that the environment names."""
    host, names = target.rpartition(":")[0].strip("[]"), os.environ
    proxy = next((names[each] for each in PROXIES if each in names), "").casefold()
    if is_loopback(host) or not proxy.startswith("http://"):  # gRPC takes no other
        return False
    host, exempt = host.casefold(), names.get("no_grpc_proxy", names.get("no_proxy", "")).casefold()
    return not any(host.endswith(each) or _is_in(host, each) for each in exempt.replace(" ", "").split(",") if each)


def _is_in(host: str, network: str) -> bool:
    try:
        return ip_address(host) in ip_network(network, strict=False)
    except ValueError:  # one of them is a name
        return False


def find_cause(server: Server, target: str) -> Cause | None:
    """What is wrong between this machine and `target`; None: nothing is found. Takes up to a few seconds."""
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    try:
        plain = socket.create_connection((host, int(port)), timeout=PROBE_S)
    except socket.gaierror:
        return Cause(f"no machine is known by the name {host}")
    except ConnectionRefusedError:
        return Cause(f"nothing listens at {target}: is `laps-sd up` running there?")
    except TimeoutError:
        return Cause(f"{target} does not answer: is the machine up, and the port open in its firewall?")
    except OSError as error:
        return Cause(f"{target} cannot be reached: {error.strerror or error}")
    with plain:
        return _handshake(plain, host, target, server) if server.tls else _speaks_tls(plain, target)


def _handshake(plain: socket.socket, host: str, target: str, server: Server) -> Cause | None:
    context = server.ssl_context()
    context.set_alpn_protocols(GRPC)
    try:
        with context.wrap_socket(plain, server_hostname=host) as secured:
            if secured.selected_alpn_protocol() not in GRPC:
                return _http(target)
    except ssl.SSLCertVerificationError as error:
        by = server.ca_name or "the public authorities"
        return Cause(f"the certificate of {target} is not vouched for by {by}: {error.verify_message}", False)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return None  # it hung up, and does not say why
    except ssl.SSLError as error:
        said = str(error.strerror).partition("] ")[2].rpartition(" (")[0]  # not all alerts have a `reason`
        if "no application protocol" in said:
            return _http(target)
        if any(part in said for part in ALERTS):
            return Cause(f"{target} ends the TLS handshake: {said}", False)
        return Cause(f"{target} does not speak TLS: leave out --ca (ca=) and https://", False)
    except OSError:
        pass  # so it did, or it says nothing
    return None


def _speaks_tls(plain: socket.socket, target: str) -> Cause | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(GRPC)
    try:
        context.wrap_socket(plain).close()
    except OSError:  # ssl.SSLError, too
        return _speaks_http(target)
    return Cause(f"{target} speaks TLS: pass --ca FILE (ca=) with the authority of its certificate", False)


def _speaks_http(target: str) -> Cause | None:
    """Whether `target` answers a request of HTTP/1, which a gRPC server does not."""
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = plain.recv(16)
    except OSError:
        return None
    if not answer.startswith(b"HTTP/1"):
        return None
    return _http(target)


def _http(target: str) -> Cause:
    return Cause(f"{target} speaks HTTP, not gRPC: give the port of --grpc-port (50051 by default)", False)
