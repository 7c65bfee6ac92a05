"""A private certificate authority for one stack, a certificate for each service, and Redis's user. A stack on one
machine binds to loopback and needs none of this."""

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scheduler_service.store.acl import acl_file, namespace_of

CA_NAME, CA_DAYS = "laps-sd", 3650
REDIS_USER = "scheduler"
DEFAULT_NAMESPACE = "laps-sd"  # the scheduler's own
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# A service that is called needs a server's certificate, one that calls needs a client's. A worker is never called, so
# its certificate cannot pass for the scheduler's; a drafter never calls, so its own opens no port.
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
PURPOSES = {
    "gateway": (_SERVER, _CLIENT),
    "scheduler": (_SERVER, _CLIENT),
    "worker": (_CLIENT,),
    "drafter": (_SERVER,),
    "redis": (_SERVER, _CLIENT),  # its own health check is a client
    "prometheus": (_CLIENT,),  # reads metrics, and may call nothing else
}


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certs(folder: Path, hosts: Sequence[str] = (), days: int = 365, namespace: str | None = None) -> datetime:
    """Until when the certificates are good: for so many `days`, and no longer than the authority. An authority and a
    password that are there stay; certificates are made anew, with the names that they had. `hosts`: further ones, NAME
    for all services or ROLE=NAME for one. `namespace`: of the user in Redis; None: as it was. Raises OSError, or
    ValueError if the authority's or the password's file cannot be used, the authority has ended, or a host is no
    name."""
    for name in ("ca", *PURPOSES):
        (folder / name).mkdir(mode=0o750 if name == "redis" else 0o700, parents=True, exist_ok=True)
    authority = _authority(folder / "ca")
    end = min(datetime.now(UTC) + timedelta(days=days), authority.certificate.not_valid_after_utc)
    if end < datetime.now(UTC) and days > 0:
        raise ValueError(f"{folder / 'ca'}: the authority ended on {end:%Y-%m-%d}: delete both files for a new one")
    split = [host.rpartition("=") for host in hosts]
    made = {}
    for role in PURPOSES:
        further = [name for of, _, name in split if of in ("", role)]
        made[role] = _signed(authority, (role, *further, *LOCAL_NAMES, *_names(folder / role / "tls.crt")), end)
    for name, (key, certificate) in made.items():
        _write(folder / name / "ca.crt", _pem(authority.certificate), 0o644)
        # Redis often runs as another user, in the group of this folder.
        _write(folder / name / "tls.key", _secret(key), 0o640 if name == "redis" else 0o600)
        _write(folder / name / "tls.crt", _pem(certificate), 0o644)
    password = folder / "scheduler" / "redis.password"
    if not password.exists():
        _write(password, secrets.token_urlsafe(32).encode(), 0o600)
    if not (secret := password.read_bytes().strip()):  # as the scheduler reads it
        raise ValueError(f"{password} is empty: write a password into it, or delete it for a new one")
    sha256 = hashlib.sha256(secret).hexdigest()
    users = folder / "redis" / "users.acl"
    before = namespace_of(users.read_text()) if users.exists() else None
    _write(users, acl_file(REDIS_USER, sha256, namespace or before or DEFAULT_NAMESPACE).encode(), 0o640)
    return end


def _names(file: Path) -> list[str]:
    """Those that the certificate is for, but for services' own; none if there is no such certificate."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names if name.value not in PURPOSES]


def _authority(folder: Path) -> Authority:
    """The one in this folder, made if there is none. Raises ValueError if its files cannot be used."""
    certificate_file, key_file = folder / "ca.crt", folder / "ca.key"
    if not key_file.exists():
        if certificate_file.exists():
            raise ValueError(f"{folder}: ca.key is gone: put it back, or delete ca.crt for a new authority")
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(CA_NAME)
        certificate = (
            _builder(name, name, key, datetime.now(UTC) + timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, SHA256())
        )
        _write(certificate_file, _pem(certificate), 0o644)
        _write(key_file, _secret(key), 0o600)  # last, so that where there is a key there is its certificate
    try:
        found = load_pem_private_key(key_file.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except (ValueError, TypeError) as error:  # TypeError: the key is encrypted
        raise ValueError(f"{folder}: ca.crt and ca.key are no usable PEM: {error}") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey) or found.public_key() != certificate.public_key():
        raise ValueError(f"{folder}: ca.key does not belong to ca.crt")
    return Authority(certificate, found)


def _signed(
    authority: Authority, names: Sequence[str], end: datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A key and its certificate. `names`: the service's name, then other names and addresses that it is reached
    under. Raises ValueError if one of them is none."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in dict.fromkeys(names)])
    certificate = (
        _builder(_name(names[0]), authority.certificate.subject, key, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(PURPOSES[names[0]]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, SHA256())
    )
    return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), end))
        .not_valid_after(end)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _secret(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """The file appears whole or not at all, and is at no time readable for more users than `mode` says."""
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(content)
    os.replace(draft, path)
