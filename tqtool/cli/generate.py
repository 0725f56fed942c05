"""``tqtool generate``: answer a prompt with any artifact or mlx-lm model."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from tqtool.cli.render import emit_json, note

if TYPE_CHECKING:
    from tqtool.runtime.load import LoadedModel


class Compute(StrEnum):
    """How quantized layers run."""

    PACKED = "packed"
    EXPAND = "expand"


class Activations(StrEnum):
    """What trellis kernels read of their inputs."""

    FLOAT = "float"
    INT8 = "int8"


KV_QUANT = typer.Option(
    None, "--kv-quant", metavar="SCHEME", help="KV cache: none, turbo[:k<bits>v<bits>], affine8, affine4."
)
KV_START = typer.Option(0, "--kv-start", help="Keep the KV cache full until it has so many tokens, then pack them all.")


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def generate(
        model: str = typer.Argument(..., metavar="MODEL", help="Artifact, model folder or hub id."),
        prompt: str = typer.Option(..., "--prompt", "-p", help="User message; with --raw the text to continue."),
        system: str | None = typer.Option(None, "--system", help="System message."),
        raw: bool = typer.Option(False, "--raw", help="No chat template."),
        max_tokens: int = typer.Option(256, "--max-tokens", "-m", help="Upper limit of new tokens."),
        temp: float = typer.Option(0.0, "--temp", help="Temperature; 0 is greedy."),
        top_p: float = typer.Option(0.0, "--top-p", help="Nucleus sampling; 0 is off."),
        seed: int = typer.Option(0, "--seed", help="Seed of the sampler."),
        compute: Compute = typer.Option(Compute.PACKED, "--compute", help="Keep layers packed, or make them dense."),
        activations: Activations = typer.Option(
            Activations.FLOAT,
            "--activations",
            help="int8: inputs of CUDA kernels rounded to 8 bits, faster, less exact.",
        ),
        kv_quant: str | None = KV_QUANT,
        kv_start: int = KV_START,
        as_json: bool = typer.Option(False, "--json", help="Print text and statistics as JSON at the end."),
        verbose: bool = typer.Option(False, "--verbose", help="Say on stderr what was loaded."),
        explain: bool = typer.Option(False, "--explain", help="Say on stderr how each trellis layer is computed."),
    ) -> None:
        """Answer a prompt: text on stdout as it comes, statistics on stderr."""
        import sys
        from dataclasses import asdict

        from tqtool.kv.scheme import parse_options
        from tqtool.runtime.generate import GenerateRequest, kv_bytes_per_token
        from tqtool.runtime.generate import generate as stream
        from tqtool.runtime.load import load

        request = GenerateRequest(
            prompt=prompt,
            system=system,
            raw=raw,
            max_tokens=max_tokens,
            temperature=temp,
            top_p=top_p,
            seed=seed,
            kv=parse_options(kv_quant, kv_start),
        )
        loaded = load(model, compute=compute.value, activations=activations.value)
        if verbose:
            report = loaded.report
            note(f"{report.path}: {report.n_trellis} trellis layers, {report.compute}, {report.dtype}")
            note(f"BLAS {report.blas.status}: {report.blas.library}")
            note(f"KV cache: {kv_bytes_per_token(loaded, request.kv)} bytes a token, {request.kv.name or 'full'}")
        if explain:
            note_paths(loaded)
        text = ""
        for piece in stream(loaded, request):
            text += piece.text
            if not as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        if as_json:
            emit_json({**asdict(piece), "text": text, "load": asdict(loaded.report)})
            return
        sys.stdout.write("\n")
        note(
            f"prompt {piece.prompt_tokens} tokens at {piece.prompt_tokens_per_s:.1f}/s, "
            f"answer {piece.new_tokens} tokens at {piece.new_tokens_per_s:.1f}/s ({piece.finish_reason})"
        )


def note_paths(loaded: LoadedModel) -> None:
    """One line for each way that trellis layers are computed at one row of x and at a prompt of 64."""
    from collections import Counter

    from tqtool.runtime.paths import explain

    found = explain(loaded.model, (1, 64))
    counted = Counter((path.m, path.path, path.reason) for path in found)
    for (m, path, reason), count in counted.items():
        note(f"{count} trellis layers, {'one row' if m == 1 else 'prompts'}: {path} ({reason})")
    if not found:
        note("no trellis layers")
