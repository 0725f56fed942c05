"""What a person or a program reads: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

Advance = Callable[[float, str], None]


def emit_json(value: Any) -> None:
    """Write ``value`` to stdout as JSON."""
    import sys

    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Write a table to stdout; numbers are expected to be formatted already."""
    import sys

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[str(cell) for cell in row])
    width = None if sys.stdout.isatty() else 160
    # Names and paths are data: "[a]" in one is no markup.
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


def emit_line(text: str = "") -> None:
    """Write one line to stdout."""
    import sys

    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Write one line to stderr."""
    import sys

    sys.stderr.write(text + "\n")


@contextmanager
def progress(
    label: str, total: float, *, unit: str = "", quiet: bool = False, silent_s: float = 0.0
) -> Iterator[Advance]:
    """Progress on stderr: a bar with ETA on a terminal, a line every ten percent elsewhere.

    Yields ``advance(amount, what)``; ``amount`` is in the units of ``total``. Lines begin after ``silent_s`` seconds,
    so that a phase which is usually short is seen only when it is long.
    """
    import sys
    import time

    if quiet:
        yield lambda amount, what: None
        return
    if sys.stderr.isatty():
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        percentage = TextColumn("{task.percentage:>3.0f}%")
        columns = (TextColumn("{task.description}"), BarColumn(), percentage, TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total or 1)

            def advance_bar(amount: float, what: str) -> None:
                bar.update(task, advance=amount, description=f"{label} {what}"[:60])

            yield advance_bar
        return
    started, done, shown = time.monotonic(), 0.0, 0.0

    def advance_line(amount: float, what: str) -> None:
        nonlocal done, shown
        done += amount
        share = min(1.0, done / total) if total else 1.0
        spent = time.monotonic() - started
        if (share >= shown + 0.1 or share == 1.0 > shown) and spent >= silent_s:
            shown = share
            left = spent / share - spent if share else 0.0
            note(f"{label}: {100 * share:3.0f}%  {spent:.0f} s, {left:.0f} s left  {what} {unit}".rstrip())

    yield advance_line
