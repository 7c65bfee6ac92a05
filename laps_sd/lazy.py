"""Commands that are loaded when they are called, and errors of usage as one sentence. No command lives here."""

import errno
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from laps_sd.config_file import CONFIG


class Later(TyperCommand):
    """Stands for the command at `place` in lists of commands, which so need none of its imports."""

    place = ""  # MODULE:FUNCTION, or MODULE:APP of a Typer with one command

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        return self._command().make_context(info_name, args, *rest, **extra)

    def _command(self) -> Any:
        module, _, function = self.place.partition(":")
        found = getattr(import_module(module), function)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(found)
        return typer.main.get_command(alone)


def add_commands(app: typer.Typer, commands: dict[str, tuple[str, str]]) -> None:
    """`commands`: by name where each is, MODULE:FUNCTION, and one line for lists of commands."""
    for name, (place, line) in commands.items():
        app.command(name, help=line, cls=type("Later", (Later,), {"place": place}))(_nothing)


def _nothing() -> None:
    """A stand-in does nothing."""


class Program(TyperGroup):
    """The whole command line: what is wrong with a command is one sentence on stderr, and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run: Any = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        try:
            code = run(*args, standalone_mode=False, **extra)
        except typer.TyperException as error:
            if message := _sentence(error):
                typer.echo(f"laps-sd: {message}", err=True)
            code = error.exit_code
        except ModuleNotFoundError as error:
            typer.echo(f"laps-sd: this command needs the package {error.name}, which is not here", err=True)
            code = 1
        except BrokenPipeError:
            raise
        except (OSError, UnicodeEncodeError) as error:
            typer.echo(f"laps-sd: {_words(error)}", err=True)
            code = 1
        except typer.Abort:
            code = 1
        sys.exit(code)


def fail(error: ValueError | OSError, file: Path | None) -> NoReturn:
    """Ends a command with a sentence of what is wrong with `file`, or with the one that the error names."""
    words = (error.filename or file, error.strerror) if isinstance(error, OSError) else (file, error)
    typer.echo(": ".join(("laps-sd", *(str(word) for word in words if word))), err=True)
    raise typer.Exit(1) from error


def _words(error: OSError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        letter = error.object[error.start]
        return f"output: {letter!a} is no letter of its encoding, {error.encoding}: set PYTHONIOENCODING=utf-8"
    of_output = error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF)
    words = (error.filename or ("output" if of_output else None), error.strerror or str(error) or type(error).__name__)
    return ": ".join(filter(None, words))


def _sentence(error: typer.TyperException) -> str:
    """What is wrong, and where the value comes from if not from a flag. Empty where help was printed instead."""
    words = " ".join(error.format_message().replace("Value error, ", "", 1).split())
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if not (context and param):
        return words
    match context.get_parameter_source(param.name):
        case source if source and source.name == "ENVIRONMENT":
            variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar
            return f"{words} (from the environment: {next(name for name in variables if name in os.environ)})"
        case source if source and source.name == "DEFAULT_MAP":
            return f"{words} (from {context.params.get('config') or CONFIG})"
    return words
