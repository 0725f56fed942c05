"""What feedback won on every tensor of artifacts, and where its guards acted.

    python benchmarks/feedback_gain.py ARTIFACT...

Reads manifests only: ``proxy_loss`` of a tensor against that of the plain trellis, or of rounding to nearest, in the
same Hessian. Exits 1 if a tensor has feedback and lost by it, or a guard acted (a note on a calibrated tensor).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from tqtool.artifact.reader import read_manifest
from tqtool.formats.manifest import TensorRecord


def main() -> int:
    failed = False
    for folder in map(Path, sys.argv[1:]):
        tensors = [record for record in read_manifest(folder).tensors if "proxy_loss" in record.stats]
        ratios = {record.module: record.stats["proxy_loss"] / _plain_loss(record) for record in tensors}
        lost = [name for name, ratio in ratios.items() if ratio >= 1]
        noted = [(record.module, note) for record in tensors for note in record.notes]
        print(f"{folder.name}: {len(ratios)} calibrated tensors, loss against none: {_spread(list(ratios.values()))}")
        for projection in sorted({_projection(record) for record in tensors}):
            mine = [ratios[record.module] for record in tensors if _projection(record) == projection]
            print(f"  {projection}: {_spread(mine)}")
        print(f"  not below: {len(lost)} {', '.join(map(str, lost))}")
        print(f"  guards: {len(noted)}")
        for module, note in noted:
            print(f"    {module}: {note}")
        failed = failed or bool(lost or noted or not ratios)
    return int(failed)


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
