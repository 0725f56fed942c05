"""``tqtool codec``: what the trellis codec is, and whether it is right on this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add ``codec validate`` and ``codec info``."""
    group = typer.Typer(no_args_is_help=True, help="Trellis codec: check it on this machine, list what it offers.")
    group.command("validate")(validate)
    group.command("info")(info)
    app.add_typer(group, name="codec")


def validate(
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of 256 samples per figure.")] = 4096,
    window: Annotated[int, typer.Option("--window", "-L", help="State bits: 12, 14 or 16.")] = 12,
    warmup: Annotated[int | None, typer.Option("--warmup", help="Short first pass instead of Algorithm 4.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the Gaussian samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the error of every code on Gaussian samples; exit 3 when a figure is off."""
    from dataclasses import asdict

    from tqtool.cli.render import emit_json, emit_line, emit_table, progress
    from tqtool.errors import NumericalError, UserError
    from tqtool.mathx import codes
    from tqtool.mathx.gaussian import QTIP_TABLE_2, distortion_bound, lloyd_max_error
    from tqtool.solve import validation

    codes.check_window(window)
    if blocks < 16:
        raise UserError(f"--blocks {blocks}: expected at least 16, or no figure means anything")
    with progress("validate", 8 * len(codes.CODES), quiet=as_json) as advance:
        rows = list(
            validation.validate(
                window=window, blocks=blocks, seed=seed, warmup=warmup, tick=lambda: advance(1, "figures")
            )
        )
    problems = [row for row in rows if row.problem]
    if as_json:
        emit_json({"window": window, "warmup": warmup, "blocks": blocks, "rows": [asdict(row) for row in rows]})
    else:
        table: list[list[str]] = []
        for code in codes.CODES:
            for is_best in (False, True):
                mine = [row for row in rows if row.code == code and (row.scale != 1.0) == is_best]
                cells = [f"{row.mse:.5f}±{row.se:.5f}{' !' if row.problem else ''}" for row in mine]
                table.append([f"{code}, {'best' if is_best else 'unit'} scale", *cells])
        table.append(["QTIP table 2 (L=12)", *[f"{QTIP_TABLE_2[k][0]:.4f}" for k in (1, 2, 3, 4)]])
        table.append(["goal, mul1 best scale", "", *[f"{validation.GOALS[k]:.5f}" for k in (2, 3, 4)]])
        table.append(["distortion bound", *[f"{distortion_bound(k):.5f}" for k in (1, 2, 3, 4)]])
        table.append(["Lloyd-Max scalar", *[f"{lloyd_max_error(k):.5f}" for k in (1, 2, 3, 4)]])
        search = "Algorithm 4" if warmup is None else f"warm-up {warmup}"
        title = f"mean squared error, unit Gaussian, L={window}, T=256, {search}, {blocks} blocks"
        emit_table(["code", "k=1", "k=2", "k=3", "k=4"], table, title=title)
        emit_line("all figures in range" if not problems else f"{len(problems)} figures are off")
    if problems:
        worst = problems[0]
        raise NumericalError(
            f"code {worst.code}, k={worst.k}, scale {worst.scale}: error {worst.mse:.5f}: {worst.problem}",
            hint="the compiled encoder or the code tables are broken on this machine; please report it",
        )


def info(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List codes, scales, and the instruction set that the encoder uses here."""
    import numpy as np

    from tqtool import native
    from tqtool.cli.render import emit_json, emit_line
    from tqtool.formats.trellis import BLOCK, FORMAT_VERSION
    from tqtool.mathx import codes

    _, name = native.viterbi_encode(np.zeros((1, BLOCK), np.int16), codes.levels("mul1", 12), window=12, k=3)
    facts = {
        "format_version": FORMAT_VERSION,
        "block": BLOCK,
        "windows": [12, 14, 16],
        "codes": list(codes.CODES),
        "packable_codes": list(codes.COMPUTED_CODES),
        "code_scale": codes.CODE_SCALE,
        "encoder": name,
    }
    if as_json:
        emit_json(facts)
    else:
        for key, value in facts.items():
            emit_line(f"{key}: {value}")
