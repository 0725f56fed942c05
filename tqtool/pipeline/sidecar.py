"""What an artifact with a vision tower repeats for tools that look for it in a file of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tqtool.artifact.sidecar import TOWER, VISION_NAME
from tqtool.formats.dtypes import DType
from tqtool.pipeline.preflight import readable_bytes
from tqtool.transform.plan import OutputTensor, TransformPlan

_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSidecar:
    """The tensors that are repeated; none without a tower, or where nobody wants it."""

    outputs: tuple[OutputTensor, ...]

    def files(self) -> Mapping[str, tuple[str, ...]]:
        """Relative path → names of its tensors."""
        return {VISION_NAME: tuple(output.name for output in self.outputs)} if self.outputs else {}

    def config(self, dtype_of: Callable[[OutputTensor], DType]) -> dict[str, Any]:
        """What config.json says of it, in OptiQ's words."""
        if not self.outputs:
            return {}
        dtype = dtype_of(self.outputs[0])
        stated = {"sidecar": VISION_NAME, "dtype": _NAMES.get(dtype, dtype.value), "n_tensors": len(self.outputs)}
        return {"optiq_vision": stated}

    def nbytes(self, dtype_of: Callable[[OutputTensor], DType]) -> int:
        """Bytes of its tensors."""
        return sum(math.prod(output.shape) * dtype_of(output).itemsize for output in self.outputs)


def tower_sidecar(transform: TransformPlan, *, wanted: bool) -> TowerSidecar:
    """The vision tower of ``transform``, if it has one and it is ``wanted`` twice."""
    found = tuple(output for output in transform.outputs if output.name.startswith(TOWER))
    return TowerSidecar(outputs=found if wanted else ())


def tower_hints(sidecar: TowerSidecar, dtype_of: Callable[[OutputTensor], DType]) -> tuple[str, ...]:
    """A line about what it takes."""
    if not sidecar.outputs:
        return ()
    size = readable_bytes(sidecar.nbytes(dtype_of))
    return (f"the vision tower is written twice, {size} each; --no-vision-sidecar leaves {VISION_NAME} out",)
