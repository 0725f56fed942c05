"""What feedback won on every tensor of artifacts, and where its guards acted.

    python benchmarks/feedback_gain.py ARTIFACT...

Reads manifests only: ``proxy_loss`` of a tensor against that of the plain trellis, or of rounding to nearest, in the
same Hessian. A plain loss of 0 (a weight that the plain coder serves exactly) has no ratio and is named. Exits 1 if a
tensor has feedback and lost by it, if a guard acted (an attempt at a damping that was not taken, the plain coder in its
place), or if an artifact has no tensor to compare.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tqtool.artifact.reader import read_manifest
from tqtool.errors import TqError
from tqtool.formats.manifest import TensorRecord

GUARD = re.compile(r"damping \S+: \D+ \(growth \S+\)|fell back to .+")
"""The lines of ``tqtool.solve.feedback.describe``; other notes (rows of zeros) are facts about the weight."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "artifacts", type=Path, nargs="+", metavar="ARTIFACT", help="made by trellis --ldlq or convert --method gptq"
    )
    verdicts = [is_sound(folder) for folder in parser.parse_args(argv).artifacts]  # all of them print
    return 0 if all(verdicts) else 1


def is_sound(folder: Path) -> bool:
    """Print what feedback won in ``folder``; False if it lost somewhere, a guard acted, or nothing is comparable."""
    try:
        records = read_manifest(folder).tensors
    except TqError as error:
        print(f"{folder}: {error.message}")
        return False
    tensors = [record for record in records if "proxy_loss" in record.stats]
    if not tensors:
        print(f"{folder.name}: no calibrated tensor")
        return False
    exact = [record for record in tensors if _plain_loss(record) == 0]
    compared = [record for record in tensors if _plain_loss(record) > 0]
    ratios = {record.name: record.stats["proxy_loss"] / _plain_loss(record) for record in compared}
    lost = [name for name, ratio in ratios.items() if ratio >= 1]
    lost += [record.name for record in exact if record.stats["proxy_loss"] > 0]
    guards = [(record.name, note) for record in tensors for note in record.notes if GUARD.fullmatch(note)]
    print(f"{folder.name}: {len(tensors)} calibrated tensors, loss against none: {_spread(list(ratios.values()))}")
    for projection in sorted({_projection(record) for record in compared}):
        mine = [ratios[record.name] for record in compared if _projection(record) == projection]
        print(f"  {projection}: {_spread(mine)}")
    if exact:
        print(f"  no ratio, the plain loss is 0: {len(exact)} {', '.join(record.name for record in exact)}")
    print(f"  not below: {len(lost)} {', '.join(lost)}".rstrip())
    print(f"  guards: {len(guards)}")
    for name, note in guards:
        print(f"    {name}: {note}")
    return bool(ratios) and not lost and not guards


def _plain_loss(record: TensorRecord) -> float:
    names = ("proxy_loss_plain", "proxy_loss_rtn")
    return next(record.stats[name] for name in names if name in record.stats)


def _projection(record: TensorRecord) -> str:
    return str(record.module).rpartition(".")[2]


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "none"
    return f"median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"


if __name__ == "__main__":
    sys.exit(main())
