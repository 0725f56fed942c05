"""Run ``convert`` in this process, without the reload, as most tests want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.job import Job, JobResult
from tqtool.pipeline.rules import Packed, parse_rule

Q4 = Packed(bits=4, group_size=64, mode="affine")


def plan(source: Path, out: Path, *, rules: tuple[str, ...] = (), **options: Any) -> Job:
    """The planned job; ``packing`` is 4-bit affine unless given."""
    packing = options.pop("packing", Q4)
    parsed = tuple(parse_rule(text, packing) for text in rules)
    return plan_convert(ConvertRequest(source=str(source), out=out, packing=packing, rules=parsed, **options))


def convert(source: Path, out: Path, **options: Any) -> JobResult:
    """The finished artifact."""
    return plan(source, out, **options).run()
