"""API keys: what a file says, who a key belongs to, and that a file which changes needs no restart."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from gateway.keys import Caller, Keys, Right, new_key
from laps_sd.cli import app
from protos.errors import Unauthenticated
from protos.watched import Watched


def write(file: Path, *lines: str) -> None:
    """Whole: no reader sees half of it."""
    draft = file.with_suffix(".draft")
    draft.write_text("\n".join(lines) + "\n")
    os.replace(draft, file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_key_is_its_tenants(file: Path) -> None:
    acme, acme_line = new_key("acme", [Right.GENERATE])
    other, other_line = new_key("other", [Right.GENERATE, Right.ADMIN])
    write(file, "# our tenants", "", acme_line + "  # since May", other_line)
    keys = Keys(file)
    assert keys.caller(f"Bearer {acme}") == Caller("acme", frozenset({Right.GENERATE}))
    assert keys.caller(f"bearer {other}") == Caller("other", frozenset(Right))


def test_the_file_does_not_hold_the_key() -> None:
    key, line = new_key("acme", [Right.GENERATE])
    assert len(key) > 50
    assert key.split("_", 2)[2] not in line


def test_no_two_keys_are_alike() -> None:
    assert len({new_key("acme", [Right.GENERATE]) for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "scheme", ["", "Basic {}", "{}", "Bearer", "Bearer {}x", "Bearer x{}", "Bearer  {}", "Bearer laps_"]
)
def test_anything_else_is_nobodys_and_is_not_repeated(file: Path, scheme: str) -> None:
    key, line = new_key("acme", [Right.GENERATE])
    write(file, line)
    with pytest.raises(Unauthenticated) as refused:
        Keys(file).caller(scheme.format(key))
    assert key[-20:] not in str(refused.value)


def test_a_key_of_another_line_with_that_id_is_nobodys(file: Path) -> None:
    key, line = new_key("acme", [Right.GENERATE])
    forged, _ = new_key("acme", [Right.GENERATE])
    write(file, line)
    with pytest.raises(Unauthenticated):
        Keys(file).caller(f"Bearer laps_{key.split('_')[1]}_{forged.split('_', 2)[2]}")


def test_a_key_that_is_taken_out_is_refused_and_one_put_in_is_taken_without_a_restart(file: Path) -> None:
    old, old_line = new_key("acme", [Right.GENERATE])
    new, new_line = new_key("acme", [Right.GENERATE])
    write(file, old_line)
    keys = Keys(file)
    assert keys.caller(f"Bearer {old}").tenant == "acme"
    write(file, new_line)
    assert keys.caller(f"Bearer {new}").tenant == "acme"
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {old}")


def test_a_file_that_nobody_but_its_owner_could_read_is_read_once_others_may(file: Path) -> None:
    """`chmod` changes neither its content nor the time of that."""
    allowed = False

    def load() -> str:
        if not allowed:
            raise PermissionError("not yours")
        return file.read_text()

    write(file, "old")
    allowed = True
    watched = Watched([file], load)
    write(file, "new")
    file.chmod(0o600)
    allowed = False
    assert watched.get() == "old\n"
    file.chmod(0o644)
    allowed = True
    assert watched.get() == "new\n"


@pytest.mark.parametrize("broken", ["what is this", None], ids=["malformed", "gone"])
def test_a_file_that_breaks_changes_nothing_and_is_reported_once(file: Path, broken: str | None) -> None:
    key, line = new_key("acme", [Right.GENERATE])
    write(file, line)
    keys = Keys(file)
    if broken is None:
        file.unlink()
    else:
        write(file, line, broken)
    with capture_logs() as logs:
        assert [keys.caller(f"Bearer {key}").tenant for _ in range(3)] == ["acme"] * 3
    assert [entry["event"] for entry in logs] == ["file_unusable"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("acme generate", "line 2: must be ID TENANT RIGHTS SHA256"),
        ("01234567 ac/me generate " + "0" * 64, "line 2: a tenant's name has"),
        ("01234567 acme everything " + "0" * 64, "line 2: rights are generate, admin"),
        ("01234567 acme generate 1234", "line 2: must be"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number_without_its_words(file: Path, line: str, problem: str) -> None:
    write(file, new_key("acme", [Right.GENERATE])[1], line)
    with pytest.raises(ValueError, match=problem):
        Keys(file)


def test_an_id_twice_is_refused(file: Path) -> None:
    line = new_key("acme", [Right.GENERATE])[1]
    write(file, line, line)
    with pytest.raises(ValueError, match="line 2"):
        Keys(file)


def test_the_command_prints_a_key_once_and_adds_its_line(file: Path) -> None:
    write(file, "# keys")
    result = CliRunner().invoke(
        app, ["key", "new", "acme", "--right", "generate", "--right", "admin", "--file", str(file)]
    )
    key = result.output.splitlines()[0].removeprefix("key: ")
    assert Keys(file).caller(f"Bearer {key}") == Caller("acme", frozenset(Right))


@pytest.mark.parametrize("before", ["", "# keys\n", "# a last line that an editor left without its end"])
def test_the_command_adds_a_line_of_its_own(file: Path, before: str) -> None:
    file.write_text(before)
    for tenant in ("acme", "other"):
        assert CliRunner().invoke(app, ["key", "new", tenant, "--file", str(file)]).exit_code == 0
    added = [line.split()[1] for line in file.read_text().removeprefix(before).splitlines() if line]
    assert added == ["acme", "other"]
    Keys(file)


def test_the_command_adds_no_key_to_a_file_that_a_gateway_would_refuse(file: Path) -> None:
    file.write_text("no key\n")
    result = CliRunner().invoke(app, ["key", "new", "acme", "--file", str(file)])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "line 1: must be ID TENANT RIGHTS SHA256" in result.output
    assert file.read_text() == "no key\n"


def test_the_command_refuses_a_name_that_is_none() -> None:
    result = CliRunner().invoke(app, ["key", "new", "a tenant"])
    assert result.exit_code == 2
    assert "A-Z a-z 0-9" in result.output


def run(*words: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["key", *map(str, words)])
    return result.exit_code, result.output


def test_a_list_shows_ids_tenants_and_rights_and_no_hash(file: Path) -> None:
    (_, acme), (_, other) = new_key("acme", [Right.GENERATE]), new_key("other", [Right.GENERATE, Right.ADMIN])
    write(file, "# our tenants", acme + "  # since May", other)
    code, output = run("list", "--file", file)
    rows = [line.split() for line in output.splitlines()[1:]]
    assert rows == [
        [acme.split()[0], "acme", "generate", "since", "May"],
        [other.split()[0], "other", "admin,generate"],
    ]
    assert code == 0


def test_a_revoked_key_is_nobodys_and_all_else_in_the_file_stays_as_it_was(file: Path) -> None:
    (gone, gone_line), (kept, kept_line) = new_key("acme", [Right.GENERATE]), new_key("acme", [Right.GENERATE])
    file.write_bytes(f"# our tenants\r\n\n{gone_line} # May\n{kept_line}  # June".encode())
    file.chmod(0o640)
    keys = Keys(file)
    assert run("revoke", gone_line.split()[0], "--file", file) == (0, f"revoked {gone_line.split()[0]}\n")
    assert file.read_bytes() == f"# our tenants\r\n\n{kept_line}  # June".encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert keys.caller(f"Bearer {kept}").tenant == "acme"
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {gone}")


def test_any_character_may_be_in_a_comment(file: Path) -> None:
    """Also those at which Python's splitlines ends a line, and in a file whose lines end by carriage returns."""
    (gone, gone_line), (kept, kept_line) = new_key("acme", [Right.GENERATE]), new_key("acme", [Right.GENERATE])
    comment = "# a\x85b\u2028c\x0cd"
    file.write_bytes(f"{gone_line} {comment}\r{kept_line} {comment}\r".encode())
    assert Keys(file).caller(f"Bearer {gone}").tenant == "acme"
    assert run("revoke", gone, "--file", file)[0] == 0
    assert Keys(file).caller(f"Bearer {kept}").tenant == "acme"
    assert file.read_bytes() == f"{kept_line} {comment}\r".encode()


def test_a_key_is_revoked_in_the_file_that_a_link_leads_to(file: Path, tmp_path: Path) -> None:
    key, line = new_key("acme", [Right.GENERATE])
    write(file, line)
    keys = Keys(file)
    link = tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(file)
    assert run("revoke", key, "--file", link)[0] == 0
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {key}")
    assert link.is_symlink()


def test_a_key_can_be_revoked_by_itself(file: Path) -> None:
    key, line = new_key("acme", [Right.GENERATE])
    write(file, line)
    assert run("revoke", key, "--file", file)[0] == 0
    assert file.read_text() == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "there is no key '01234567'"), ("what is this", "line 1: must be"), (None, "No such file")],
)
def test_a_file_without_that_key_is_a_sentence_and_stays(file: Path, text: str | None, problem: str) -> None:
    if text is not None:
        file.write_text(text)
    code, output = run("revoke", "01234567", "--file", file)
    assert (code, output.count("\n"), str(file) in output, problem in output) == (1, 1, True, True)
    assert not file.exists() or file.read_text() == text
