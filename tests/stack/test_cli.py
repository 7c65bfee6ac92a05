"""The command line as a whole: what its help needs, what it says of wrong input, and how Ctrl-C ends it."""

import errno
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.keys import new_key
from gateway.rights import Right
from laps_sd import cli
from laps_sd.interrupt import INTERRUPTED
from tests.waiting import WAIT_S
from worker_service.outputs import writable

TABLES = {"": cli.COMMANDS, "key ": cli.KEY_COMMANDS, "bench ": cli.BENCH_COMMANDS}
NAMES = [prefix + name for prefix, table in TABLES.items() for name in table]
HEAVY = {
    *("torch", "transformers", "scipy", "numpy", "matplotlib", "grpc", "google", "redis", "structlog"),
    *("pydantic_settings", "starlette", "uvicorn", "httpx2", "tokenizers", "cryptography", "jinja2", "asyncio"),
}
# All of them in one process: the helps of all commands together may load no more than one may.
HELPS = """
import sys
from typer.testing import CliRunner
from laps_sd.cli import app
for name in sys.argv[1:]:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0, (name, result.output, result.exception)
    heavy = {module.partition(".")[0] for module in sys.modules} & HEAVY
    assert not heavy, f"laps-sd {name} --help loads {heavy}"
"""


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=WAIT_S)


def test_no_help_loads_what_a_service_needs() -> None:
    ended = python(HELPS.replace("HEAVY", repr(HEAVY)), "", *NAMES)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_command_is_where_the_table_says(name: str) -> None:
    group, _, word = name.rpartition(" ")
    module, _, function = TABLES[f"{group} ".lstrip()][word][0].partition(":")
    assert getattr(import_module(module), function).__doc__


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"laps-sd {version('laps-sd')}\n")


def test_the_help_names_a_models_revision() -> None:
    """Rich would take [@REVISION] for markup, and not show it."""
    assert "OWNER/NAME@REVISION" in CliRunner().invoke(cli.app, ["pull", "--help"]).output


def test_completion_knows_commands_and_flags() -> None:
    asked = {"_LAPS_SD_COMPLETE": "complete_bash", "COMP_CWORD": "2", "COMP_WORDS": "laps-sd up --kv"}
    ended = subprocess.run(
        [sys.executable, "-m", "laps_sd"], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["--kv-tokens"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["uq"], "laps-sd: No such command 'uq'.\n"),
        (["generate"], "laps-sd: Missing argument 'prompt'.\n"),
        (["up", "--slots", "many"], "laps-sd: Invalid value for '--slots': Input should be a valid integer"),
        (["up", "--slot", "2"], "laps-sd: No such option: --slot"),
        (
            ["generate", "hi", "--regex", "a", "--choice", "b"],
            "laps-sd: Invalid value for --regex and --choice: give one",
        ),
        (["key", "new", "bad/name"], "laps-sd: Invalid value for TENANT: a tenant's name has 1 to 64"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("where", ["laps_sd.certs", "laps_sd.authority"])  # the command itself; what it imports later
def test_a_package_that_is_missing_is_one_sentence(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, where, raising=False)
    monkeypatch.setitem(sys.modules, "typer" if where == "laps_sd.certs" else "cryptography", None)
    result = CliRunner().invoke(cli.app, ["certs", str(tmp_path / "certs")])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("laps-sd: this command needs the package ")


# Ctrl-C at a chosen moment of a command: while a module is loaded, and while it is loaded in a destructor's stead.
INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["laps-sd", "up", "--grpc-port", "0", "--http-port", "0"]
from laps_sd.__main__ import main
main()
"""
INTERRUPTED_DESTRUCTOR = """
import os, signal
from laps_sd.interrupt import quietly
class Short:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
quietly(Short)
"""


@pytest.mark.parametrize(
    "module", ["laps_sd.cli", "typer", "laps_sd.up", "pydantic", "laps_sd.service_checks", "redis"]
)
def test_ctrl_c_while_modules_are_loaded_leaves_no_traceback(module: str) -> None:
    ended = python(INTERRUPTED_IMPORT.format(module=module))
    assert (ended.returncode, ended.stdout) == (INTERRUPTED, "")
    assert ended.stderr.count("\n") <= 1, ended.stderr


def test_ctrl_c_in_a_destructor_leaves_no_traceback() -> None:
    ended = python(INTERRUPTED_DESTRUCTOR)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "")


def test_a_program_that_is_run_for_a_command_ends_as_quietly() -> None:
    command = [sys.executable, "-m", "laps_sd.interrupt", "tests.stack.interrupts_itself"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr.count("\n")) == (INTERRUPTED, 1)


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(flag: str) -> None:
    result = CliRunner().invoke(cli.app, ["simulate", "--workload", "/no/such", flag, "/no/such/folder/file"])
    assert result.exit_code == 2
    assert f"'{flag}': /no/such/folder/file cannot be written: No such file or directory\n" in result.stderr


INTERRUPTED_DATACLASS = """
import os, signal
from laps_sd.interrupt import INTERRUPTED, quietly
def program():
    try:
        exec("os.kill(os.getpid(), signal.SIGINT)", {"os": os, "signal": signal})
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED)
quietly(program)
"""
INTERRUPTED_LIBRARY = """
import os, signal
from laps_sd.interrupt import quietly
def program():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    raise ModuleNotFoundError("could not be loaded")
quietly(program)
"""


def test_ctrl_c_while_code_is_made_ends_with_130_and_not_by_the_signal() -> None:
    ended = python(INTERRUPTED_DATACLASS)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "")


def test_a_library_that_turns_ctrl_c_into_another_error_is_no_error() -> None:
    ended = python(INTERRUPTED_LIBRARY)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "interrupted\n")


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(tmp_path / "file")
    writable(link)
    assert link.is_symlink()
    assert not link.exists()


def test_a_pipe_may_be_written_by_the_name_that_the_system_gives_it() -> None:
    end, other = os.pipe()
    try:
        writable(Path(f"/dev/fd/{other}"))
    finally:
        os.close(end)
        os.close(other)


@pytest.mark.parametrize("words", [["key", "new", "me", "--file", "/dev/full"], ["certs", "TMP/certs"]])
def test_a_full_disk_is_told_with_its_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("laps_sd.authority.make_certs", full)
    words = [word.replace("TMP", str(tmp_path)) for word in words]
    assert CliRunner().invoke(cli.app, words).stderr == f"laps-sd: {words[-1]}: No space left on device\n"


def test_a_comment_of_a_key_is_shown_as_it_is(tmp_path: Path) -> None:
    _, line = new_key("me", [Right.GENERATE])
    (file := tmp_path / "keys").write_text(f"{line} # [Ann] [/x]\n")
    result = CliRunner().invoke(cli.app, ["key", "list", "--file", str(file)])
    assert "[Ann] [/x]" in result.output


def test_what_pull_runs_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a signal, and the exit code, are the program's own."""
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: ran.append(words))
    CliRunner().invoke(cli.app, ["pull", "--list"])
    assert [words[-2:] for words in ran] == [["worker_service.pull", "--list"]]


def test_grpc_adds_no_lines_of_its_own() -> None:
    """Of a handshake that fails it logs several, and the user knows none of their words."""

    def answer(server: socket.socket) -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = server.accept()
                connection.sendall(b"no TLS")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        words = ["generate", "hi", "--server", f"https://127.0.0.1:{server.getsockname()[1]}"]
        ended = subprocess.run(
            [sys.executable, "-m", "laps_sd", *words], capture_output=True, text=True, timeout=WAIT_S
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "does not speak TLS" in ended.stderr
