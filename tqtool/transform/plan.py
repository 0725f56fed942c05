"""Plan a transform from names, shapes and config alone: no array is touched.

``plan_identity`` claims every tensor and knows modules, roles and the head; ``plan_rotation`` adds the folds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqtool.transform.claim import identity_outputs, read_layout
from tqtool.transform.folds import Fill, OnRows, Op, RotateHeads, RotateInput, RotateOutput, Rotation, ScaleInput
from tqtool.transform.outputs import DroppedTensor, OutputTensor, PlanRow, Role, TransformPlan
from tqtool.transform.rotation import plan_rotation
from tqtool.transform.select import select_family

__all__ = [
    "DroppedTensor",
    "Fill",
    "OnRows",
    "Op",
    "OutputTensor",
    "PlanRow",
    "Role",
    "RotateHeads",
    "RotateInput",
    "RotateOutput",
    "Rotation",
    "ScaleInput",
    "TransformPlan",
    "plan_identity",
    "plan_rotation",
]


def plan_identity(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> TransformPlan:
    """Pass every tensor through unchanged, knowing what each one is.

    Args:
        shapes: Shape of every source tensor, by name.
        config: Parsed config.json.

    Returns:
        A plan whose outputs and dropped tensors together claim every source tensor.

    Raises:
        UserError: The architecture is not known.
        SourceError: A tensor is missing, left over, or has another shape than config.json implies.
    """
    layout = read_layout(select_family(config), shapes, config)
    return TransformPlan(
        id="identity",
        outputs=identity_outputs(layout),
        config_updates=layout.config_updates,
        dropped=layout.dropped,
    )
