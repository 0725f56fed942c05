"""``tqtool import-gguf``: a GGUF file becomes a normal Hugging Face folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from tqtool.cli.render import emit_json, emit_line, emit_table, note, progress


class FloatType(StrEnum):
    """Types the folder can be stored in."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("import-gguf")
    def import_gguf(
        file: Path = typer.Argument(..., metavar="FILE", help="The GGUF file."),
        out: Path = typer.Argument(..., metavar="OUT", help="Folder to create; must not exist or be empty."),
        dtype: FloatType = typer.Option(FloatType.BF16, "--dtype", help="Type of the stored weights."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, print the plan, write nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
    ) -> None:
        """Turn a GGUF file into a Hugging Face folder: config, safetensors, tokenizer, chat template."""
        from tqtool.formats.dtypes import DType
        from tqtool.pipeline.import_gguf import ImportPlan, plan_import, run_import

        plan: ImportPlan = plan_import(file, out, dtype=DType[dtype.name])
        if not dry_run:
            with progress("import", plan.n_parameters, quiet=as_json) as advance:
                for line in run_import(plan, advance):
                    note(f"note: {line}")
        if as_json:
            emit_json({**plan.to_json(), "written": not dry_run})
            return
        types = ", ".join(f"{count} {name}" for name, count in plan.source_types.items())
        head = "tied to the embedding" if plan.config["tie_word_embeddings"] else "its own tensor"
        rows = [
            ("architecture", f"{plan.file.architecture} → {plan.config['model_type']}"),
            ("tensors", f"{len(plan.tensors)} ({types})"),
            ("weights", f"{plan.n_parameters:,}, {plan.weight_bytes / 1e6:.1f} MB as {plan.dtype.value}"),
            ("head", head),
            ("undone", ", ".join(f"{name}: {count} tensors" for name, count in plan.edits.items()) or "nothing"),
            ("files", ", ".join(sorted(plan.tokenizer.files))),
            *(("note", line) for line in plan.tokenizer.notes),
        ]
        emit_table(("", ""), rows, title="would write" if dry_run else "wrote")
        emit_line(str(out))
