"""The command line: one module per verb, one place where errors become exit codes."""

from __future__ import annotations

import importlib
import sys

import typer

from tqtool.errors import TqError

VERBS = (
    "inspect",
    "import_gguf",
    "convert",
    "trellis",
    "verify",
    "codec",
    "teacher",
    "eval",
    "generate",
)


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
    ) -> None:
        del traceback  # read from argv in main(): it must also work when parsing itself fails

    for verb in VERBS:
        importlib.import_module(f"tqtool.cli.{verb}").register(app)
    return app


def main() -> None:
    """Entry point of ``tqtool``: exit codes 1 internal, 2 user, 3 numerical, 4 artifact, 5 backend, 130 interrupted."""
    show_traceback = "--traceback" in sys.argv
    if show_traceback:
        sys.argv.remove("--traceback")
    try:
        build_app()()
    except TqError as error:
        if show_traceback:
            raise
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        sys.exit(error.exit_code)
    except Exception as error:
        # A bug of ours must not end in a page of traceback either; it says so and where to look.
        if show_traceback:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        sys.stderr.write(
            f"error: internal error: {reason}\nhint: a bug in tqtool; --traceback shows where, please report it\n"
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was left under the final name\n")
        sys.exit(130)
