"""`laps-sd certs`: what it makes, what it keeps, and who may read it."""

import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from laps_sd.authority import make_certs
from laps_sd.cli import app


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["certs", *map(str, arguments)])
    return result.exit_code, result.output


def test_each_service_gets_its_own_folder(tmp_path: Path) -> None:
    assert invoke(tmp_path, "--host", "gw.example", "--host", "10.0.0.3")[0] == 0
    for service in ("gateway", "scheduler", "worker", "redis"):
        assert {"ca.crt", "tls.crt", "tls.key"} <= {file.name for file in (tmp_path / service).iterdir()}


def test_keys_and_passwords_are_the_owners_alone_but_for_what_redis_reads(certs: Path) -> None:
    secrets = [*certs.glob("*/*.key"), certs / "scheduler" / "redis.password", certs / "redis" / "users.acl"]
    readable = [file.relative_to(certs) for file in secrets if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)]
    assert sorted(map(str, readable)) == ["redis/tls.key", "redis/users.acl"]
    assert not any(file.stat().st_mode & stat.S_IRWXO & ~stat.S_IROTH for file in secrets)


def test_run_again_it_renews_certificates_and_keeps_authority_and_password(certs: Path) -> None:
    kept = {file: file.read_bytes() for file in (certs / "ca" / "ca.crt", certs / "scheduler" / "redis.password")}
    renewed = {file: file.read_bytes() for file in certs.glob("*/tls.crt")}
    make_certs(certs)
    assert all(file.read_bytes() == content for file, content in kept.items())
    assert len(renewed) == 6
    assert all(file.read_bytes() != content for file, content in renewed.items())


def names_of(folder: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def test_a_name_for_one_service_is_in_no_other_certificate(tmp_path: Path) -> None:
    """A drafter's key cannot pass for the scheduler's, nor for the public gateway's."""
    given = ("scheduler=s.example", "scheduler=::2", "gateway=gw.example", "all.example")
    assert invoke(tmp_path, *(word for name in given for word in ("--host", name)))[0] == 0
    local = {"localhost", "127.0.0.1", "::1", "all.example"}
    assert set(names_of(tmp_path / "scheduler")) == local | {"scheduler", "s.example", "::2"}
    assert set(names_of(tmp_path / "gateway")) == local | {"gateway", "gw.example"}
    for role in ("worker", "drafter", "redis", "prometheus"):
        assert set(names_of(tmp_path / role)) == local | {role}


def test_run_again_it_keeps_names_and_namespace(tmp_path: Path) -> None:
    """Else a renewal by the bare command would leave services that nobody can reach under their names."""
    first = ("--host", "scheduler=s.example", "--host", "10.0.0.3", "--namespace", "mine")
    assert invoke(tmp_path, *first)[0] == invoke(tmp_path, "--host", "redis=r.example")[0] == 0
    assert {"s.example", "10.0.0.3"} < set(names_of(tmp_path / "scheduler"))
    assert {"r.example", "10.0.0.3"} < set(names_of(tmp_path / "redis"))
    assert "s.example" not in names_of(tmp_path / "redis")
    assert "~{mine}:*" in (tmp_path / "redis" / "users.acl").read_text()
    for renewed in ("scheduler", "worker"):  # a file that was put into the wrong folder gives no service's name away
        shutil.copy(tmp_path / "redis" / "tls.crt", tmp_path / renewed / "tls.crt")
    assert invoke(tmp_path, "--namespace", "other")[0] == 0
    assert "redis" not in names_of(tmp_path / "worker")
    assert "~{other}:*" in (tmp_path / "redis" / "users.acl").read_text()


@pytest.mark.parametrize("host", ["planner=s.example", "=s.example", "scheduler=", ""])
def test_a_host_of_no_service_is_a_sentence(tmp_path: Path, host: str) -> None:
    code, output = invoke(tmp_path, "--host", host)
    assert (code, f"{host!r} must be NAME, or ROLE=NAME where ROLE is one of gateway, scheduler" in output) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["gateway", "worker=gateway"])
def test_no_service_gets_the_name_that_another_is_known_by(tmp_path: Path, host: str) -> None:
    """A worker's certificate would pass for the gateway's."""
    code, output = invoke(tmp_path, "--host", host)
    assert (code, "which has its own" in output) == (2, True)
    assert not list(tmp_path.iterdir())


def test_the_acl_file_holds_no_password(certs: Path) -> None:
    password = (certs / "scheduler" / "redis.password").read_text()
    assert len(password) >= 32
    assert password not in (certs / "redis" / "users.acl").read_text()


def test_certificates_are_made_without_any_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert invoke(tmp_path)[0] == 0


def test_a_service_is_its_name_signed_by_the_authority_for_what_it_does(tmp_path: Path) -> None:
    make_certs(tmp_path, ["gw.example", "10.0.0.3"], days=30)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca" / "ca.crt").read_bytes())
    worker = x509.load_pem_x509_certificate((tmp_path / "worker" / "tls.crt").read_bytes())
    worker.verify_directly_issued_by(authority)
    assert worker.subject.rfc4514_string() == "CN=worker"
    assert names_of(tmp_path / "worker") == ["worker", "gw.example", "localhost", "10.0.0.3", "127.0.0.1", "::1"]
    purposes = worker.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert (worker.not_valid_after_utc - worker.not_valid_before_utc).days == 30


def test_an_authority_that_cannot_be_used_is_a_sentence_and_stays(tmp_path: Path) -> None:
    make_certs(tmp_path)
    (tmp_path / "ca" / "ca.key").write_text("no key")
    code, output = invoke(tmp_path)
    assert (code, output.count("\n")) == (1, 1)
    assert "no usable PEM" in output
    assert (tmp_path / "ca" / "ca.key").read_text() == "no key"


def test_an_authority_whose_key_is_gone_is_not_replaced(certs: Path) -> None:
    (certs / "ca" / "ca.key").unlink()
    before = (certs / "ca" / "ca.crt").read_bytes()
    problem = "ca.key is gone: put it back, or delete ca.crt for a new authority"
    assert invoke(certs) == (1, f"laps-sd: {certs / 'ca'}: {problem}\n")
    assert (certs / "ca" / "ca.crt").read_bytes() == before
    (certs / "ca" / "ca.crt").unlink()
    assert invoke(certs)[0] == 0


def test_a_host_that_is_no_name_is_a_sentence_and_changes_no_certificate(certs: Path) -> None:
    before = (certs / "gateway" / "tls.crt").read_bytes()
    code, output = invoke(certs, "--host", "größe")
    assert (code, output.count("\n")) == (1, 1)
    assert (certs / "gateway" / "tls.crt").read_bytes() == before


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output = invoke(tmp_path / "file" / "certs")
    assert code == 1
    assert output.startswith("laps-sd: ")
    assert output.count("\n") == 1


def test_certificates_are_good_no_longer_than_their_authority(certs: Path) -> None:
    end = make_certs(certs, days=36_500)
    authority = x509.load_pem_x509_certificate((certs / "ca" / "ca.crt").read_bytes())
    certificate = x509.load_pem_x509_certificate((certs / "gateway" / "tls.crt").read_bytes())
    assert certificate.not_valid_after_utc == authority.not_valid_after_utc == end


def test_a_password_of_ones_own_is_what_the_scheduler_reads(certs: Path) -> None:
    """Editors end a file with a line break."""
    password = certs / "scheduler" / "redis.password"
    password.write_text("my-own-secret\n")
    make_certs(certs)
    assert hashlib.sha256(b"my-own-secret").hexdigest() in (certs / "redis" / "users.acl").read_text()
    password.write_text("\n")
    with pytest.raises(ValueError, match=r"redis\.password is empty"):
        make_certs(certs)


@pytest.mark.parametrize("namespace", ["", "x y", "x>"])
def test_a_namespace_that_the_scheduler_would_refuse_is_a_sentence(tmp_path: Path, namespace: str) -> None:
    code, output = invoke(tmp_path, "--namespace", namespace)
    assert (code, "letters, digits" in output) == (2, True)
    assert not list(tmp_path.iterdir())
