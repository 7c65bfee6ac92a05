"""`laps-sd certs`: a private certificate authority for one stack, a certificate for each service, and Redis's user.

The program openssl makes them. A stack on one machine binds to loopback and needs none of this.
"""

import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from scheduler_service.store.acl import acl_file

CA_DAYS = 3650
REDIS_USER = "scheduler"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# A service that is called needs a server's certificate, one that calls needs a client's. A worker is never called, so
# its certificate cannot pass for the scheduler's.
PURPOSES = {
    "gateway": "serverAuth,clientAuth",
    "scheduler": "serverAuth,clientAuth",
    "worker": "clientAuth",
    "redis": "serverAuth,clientAuth",  # its own health check is a client
}
# openssl's configuration, so that the system's has no effect.
_CONFIG = """
[req]
distinguished_name = subject
prompt = no
[subject]
CN = {name}
[ca]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[service]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = {purposes}
subjectAltName = {names}
"""


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets one folder for each service.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address that services are reached under; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the services' certificates are good for.")] = 365,
    namespace: Annotated[str, typer.Option(help="The scheduler's: its user in Redis sees no other keys.")] = "laps-sd",
) -> None:
    """Make a private CA, certificates for mutual TLS and a user of Redis. Run again, it renews the certificates.

    Each service's folder holds ca.crt, tls.crt and tls.key. Whoever has DIR/ca/ca.key can make more: keep it away.
    """
    if taken := PURPOSES.keys() & set(host or ()):
        problem = f"{', '.join(taken)}: every service gets these names, and would pass for that one, which has its own"
        raise typer.BadParameter(problem, param_hint="--host")
    if shutil.which("openssl") is None:
        typer.echo("laps-sd: certificates are made by the program openssl, which is not on the PATH", err=True)
        raise typer.Exit(1)
    try:
        make_certs(folder, host or (), days, namespace)
    except subprocess.CalledProcessError as error:
        typer.echo(f"laps-sd: openssl: {error.stderr.decode(errors='replace').strip()}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"laps-sd: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{folder}: certificates of {', '.join(PURPOSES)}, good for {days} days")


def make_certs(folder: Path, hosts: Sequence[str] = (), days: int = 365, namespace: str = "laps-sd") -> None:
    """Raises OSError, or CalledProcessError with what openssl said."""
    for name in ("ca", *PURPOSES):
        (folder / name).mkdir(mode=0o750 if name == "redis" else 0o700, parents=True, exist_ok=True)
    ca = folder / "ca"
    if not (ca / "ca.key").exists():
        _make_ca(ca)
    for name in PURPOSES:
        _make_certificate(ca, folder / name, (name, *hosts, *LOCAL_NAMES), days)
    password = folder / "scheduler" / "redis.password"
    if not password.exists():
        _write(password, secrets.token_urlsafe(32), 0o600)
    sha256 = hashlib.sha256(password.read_bytes()).hexdigest()
    _write(folder / "redis" / "users.acl", acl_file(REDIS_USER, sha256, namespace), 0o640)


def _make_ca(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        key, cert = Path(made, "ca.key"), Path(made, "ca.crt")
        text = _CONFIG.format(name="laps-sd", purposes="clientAuth", names="DNS:ca")  # the section [ca] alone is used
        config = _write(Path(made, "openssl.cnf"), text)
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        _openssl(
            *("req", "-x509", "-new", "-sha256", "-days", CA_DAYS, "-key", key, "-out", cert),
            *("-config", config, "-extensions", "ca"),
        )
        _publish(cert, folder, 0o644)
        _publish(key, folder, 0o600)  # last, so that where there is a key there is its certificate


def _make_certificate(ca: Path, folder: Path, names: Sequence[str], days: int) -> None:
    """`names`: the service's name, then other names and addresses that it is reached under."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        key, request, cert = Path(made, "tls.key"), Path(made, "tls.csr"), Path(made, "tls.crt")
        text = _CONFIG.format(name=names[0], purposes=PURPOSES[names[0]], names=_alternatives(names))
        config = _write(Path(made, "openssl.cnf"), text)
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        _openssl("req", "-new", "-key", key, "-out", request, "-config", config)
        _openssl(
            *("x509", "-req", "-sha256", "-days", days, "-in", request, "-out", cert),
            *("-CA", ca / "ca.crt", "-CAkey", ca / "ca.key", "-set_serial", secrets.randbits(127)),
            *("-extfile", config, "-extensions", "service"),
        )
        _publish(Path(shutil.copyfile(ca / "ca.crt", Path(made, "ca.crt"))), folder, 0o644)
        # Redis often runs as another user, in the group of this folder.
        _publish(key, folder, 0o640 if names[0] == "redis" else 0o600)
        _publish(cert, folder, 0o644)


def _alternatives(names: Iterable[str]) -> str:
    def alternative(name: str) -> str:
        try:
            return f"IP:{ip_address(name)}"
        except ValueError:
            return f"DNS:{name}"

    return ",".join(map(alternative, names))


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, stdin=subprocess.DEVNULL)


def _publish(made: Path, folder: Path, mode: int) -> None:
    """Moves a finished file into `folder`: it appears there whole or not at all."""
    made.chmod(mode)
    os.replace(made, folder / made.name)


def _write(path: Path, text: str, mode: int = 0o600) -> Path:
    """Writes the file whole or not at all, and at no time readable for more users than `mode` says."""
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    os.replace(draft, path)
    return path
