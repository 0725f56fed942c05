"""The command line: one module per verb, one place where errors become exit codes."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import typer

from tqtool.errors import TqError, UserError
from tqtool.runtime.blas import IDLE_THREADS

VERBS = (
    "inspect",
    "import_gguf",
    "convert",
    "trellis",
    "calibrate",
    "run",
    "sensitivity",
    "kmap",
    "codec",
    "verify",
    "teacher",
    "eval",
    "compare",
    "generate",
    "serve",
    "bench",
    "card",
    "upload",
)

PANELS = {
    "Look and import": ("inspect", "import-gguf"),
    "Quantize": ("convert", "trellis", "calibrate", "sensitivity", "kmap", "run", "codec"),
    "Prove": ("verify", "teacher", "eval", "compare"),
}
"""How ``tqtool --help`` groups the verbs."""
OTHER_PANEL = "Run and publish"


def build_app() -> typer.Typer:
    """The application with every verb registered; imports nothing heavy."""
    app = typer.Typer(
        name="tqtool",
        help="Quantize language models offline, prove what was written, run the result.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        traceback: bool = typer.Option(False, "--traceback", help="Show the Python traceback of an error."),
        version: bool = typer.Option(False, "--version", is_eager=True, callback=_version, help="Show the version."),
    ) -> None:
        del traceback, version  # the first is read from argv in main(): it must also work when parsing itself fails

    for verb in VERBS:
        importlib.import_module(f"tqtool.cli.{verb}").register(app)
    _tidy(app)
    for command in app.registered_commands:
        command.rich_help_panel = _panel(command.name)
    for group in app.registered_groups:
        group.rich_help_panel = _panel(group.name)
    return app


def _panel(verb: str | None) -> str:
    return next((panel for panel, names in PANELS.items() if verb in names), OTHER_PANEL)


def _tidy(app: typer.Typer) -> None:
    """Paragraphs of every help without the line breaks of the source: terminals have widths of their own."""
    for command in app.registered_commands:
        text = inspect.cleandoc(command.help or inspect.getdoc(command.callback) or "")
        command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in text.split("\n\n"))
        command.name = command.name or str(getattr(command.callback, "__name__", "")).replace("_", "-")
    for group in app.registered_groups:
        assert group.typer_instance is not None, "a group has commands"
        _tidy(group.typer_instance)


def main() -> None:
    """Entry point of ``tqtool``.

    Exit codes: 1 internal, 2 user, 3 numerical, 4 artifact, 5 backend, 130 interrupted, 143 terminated.
    """
    # Before numpy is imported: its BLAS threads would spin on cores that MLX and our kernels want.
    os.environ.setdefault(*IDLE_THREADS)
    show_traceback = "--traceback" in sys.argv
    if show_traceback:
        sys.argv.remove("--traceback")
    # A signal that the shell told us to ignore (nohup, a job in the background) stays ignored.
    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _stop) for number in heard}
    try:
        build_app()()
    except TqError as error:
        if show_traceback:
            raise
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        sys.exit(error.exit_code)
    except PermissionError as error:
        # Any path on the way may be closed to this user, and only the system knows which.
        if show_traceback:
            raise
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\nhint: check who may read or write it\n")
        sys.exit(UserError.exit_code)
    except Exception as error:
        # A bug of ours must not end in a page of traceback either; it says so and where to look.
        if show_traceback:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        sys.stderr.write(
            f"error: internal error: {reason}\nhint: a bug in tqtool; --traceback shows where, please report it\n"
        )
        sys.exit(1)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"tqtool {version('tqtool')}\n")
        raise typer.Exit


RESUMABLE = {"calibrate", "run", "sensitivity"}
"""Verbs whose interrupted work stays and is gone on with."""
WRITES_NOTHING = {"inspect", "verify", "codec", "generate", "bench", "serve"}


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C and a polite kill: unwind, so that partial folders go; the second signal kills at once.

    Not KeyboardInterrupt, which typer turns into a silent exit.
    """
    del frame
    signal.signal(number, signal.SIG_DFL)
    word = "interrupted" if number == signal.SIGINT else "terminated"
    verb = "".join(sys.argv[1:2])
    kept = "; nothing was left under the final name"
    if verb in RESUMABLE:
        kept = "; --resume goes on from what is there"
    elif verb == "upload":
        kept = "; what was sent stays on the hub, not yet loadable; the same command goes on"
    elif verb in WRITES_NOTHING:
        kept = ""
    sys.stderr.write(f"{word}{kept}\n")
    sys.exit(128 + number)
