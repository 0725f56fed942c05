"""What an artifact holds beside its own tensors: a companion in a folder of its own, a vision tower once more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tqtool.formats.dtypes import DType
from tqtool.pipeline.companion import CompanionRequest, bundled_notes, bundled_request, companion_hints, plan_bundled
from tqtool.pipeline.dense import StoredDtype
from tqtool.pipeline.job import JobExtras
from tqtool.pipeline.sidecar import tower_hints, tower_sidecar
from tqtool.source.checkpoint import Checkpoint
from tqtool.transform.plan import TransformPlan


def with_beside(
    extras: JobExtras,
    checkpoint: Checkpoint,
    transform: TransformPlan,
    *,
    out: Path,
    mtp: CompanionRequest | None,
    vision_sidecar: bool,
    dtype: DType | None = None,
) -> JobExtras:
    """``extras`` with the companion that was asked for, and the tower's second copy unless nobody wants it.

    Args:
        extras: Of the job.
        checkpoint: Its source.
        transform: Its plan.
        out: Its folder.
        mtp: The companion, or None.
        vision_sidecar: Whether a tower is repeated in a file of its own.
        dtype: Of dense values; None is what the source declares.

    Raises:
        UserError, SourceError: as ``plan_bundled``.
    """
    dtype_of = StoredDtype(checkpoint, dtype).of
    companion = plan_bundled(mtp, checkpoint, transform, out=out, dtype=dtype)
    sidecar = tower_sidecar(transform, wanted=vision_sidecar)
    return replace(
        extras,
        config={**extras.config, **sidecar.config(dtype_of)},
        sidecars=sidecar.files(),
        companion=companion,
        plan_notes=(*extras.plan_notes, *bundled_notes(companion)),
        hints=(*extras.hints, *companion_hints(transform, companion), *tower_hints(sidecar, dtype_of)),
        request={**extras.request, **bundled_request(companion)},
    )
