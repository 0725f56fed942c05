"""A tiny model at several rates, and a dump of its logits: what sensitivity is measured on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tests.support.conversions import convert
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.evals.teacher import TeacherRequest, dump_teacher
from tqtool.pipeline.rules import Packed
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.runtime.load import load
from tqtool.solve.trellis import TrellisOptions

WINDOWS, CONTEXT = 2, 24


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Source, dump, and artifacts by bits."""

    source: Path
    dump: Path
    coded: dict[int, Path]
    text: Path


def trellis_setup(folder: Path, tiny: Tiny, rates: tuple[int, ...] = (2, 3, 4)) -> Setup:
    """MLP layers on the trellis at each of ``rates``."""
    setup = _setup(folder, tiny, {k: folder / f"k{k}" for k in rates})
    for k, out in setup.coded.items():
        write_trellis(setup.source, out, k=k)
    return setup


def affine_setup(folder: Path, tiny: Tiny, rates: tuple[int, ...] = (3, 4, 6), seed: int | None = None) -> Setup:
    """Every module packed at each of ``rates``."""
    setup = _setup(folder, tiny, {bits: folder / f"b{bits}" for bits in rates})
    for bits, out in setup.coded.items():
        convert(setup.source, out, packing=Packed(bits=bits, group_size=64, mode="affine"), rotation_seed=seed)
    return setup


def write_trellis(
    source: Path,
    out: Path,
    *,
    k: int,
    k_map: dict[str, int] | None = None,
    reuse: tuple[Path, ...] = (),
    seed: int = 42,
) -> Path:
    """The artifact ``out``."""
    options = TrellisOptions(k=k, warmup=16, threads=1)
    request = TrellisRequest(
        source=str(source), out=out, options=options, k_map=k_map or {}, reuse=reuse, rotation_seed=seed
    )
    plan_trellis(request).run()
    return out


def _setup(folder: Path, tiny: Tiny, coded: dict[int, Path]) -> Setup:
    source, dump, text = write_tiny(folder / "source", tiny), folder / "dump.safetensors", folder / "text.txt"
    words = random.Random(1)
    text.write_text(" ".join(f"w{words.randrange(3, tiny.vocab)}" for _ in range(2 * WINDOWS * CONTEXT)))
    request = TeacherRequest(text=text, windows=WINDOWS, context=CONTEXT, top=64)
    dump_teacher(load(source, compute="expand"), dump, request, lambda windows: None)
    return Setup(source=source, dump=dump, coded=coded, text=text)
