"""The dtype of what is stored dense, and of affine scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqtool.formats.dtypes import DType
from tqtool.source.checkpoint import Checkpoint
from tqtool.transform.plan import OutputTensor, Role

_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}
SHORT = {DType.BF16: "bf16", DType.F16: "f16", DType.F32: "f32"}
"""As the command line spells them."""


class StoredDtype:
    """Dtype of every dense tensor: the request's, else the config's ``torch_dtype`` (as mlx-lm), else the source's."""

    def __init__(self, checkpoint: Checkpoint, requested: DType | None) -> None:
        self._checkpoint = checkpoint
        self._whole = requested or _declared(checkpoint.config)
        found = {ref.dtype for ref in checkpoint.tensors.values() if ref.dtype.is_float}
        self.config_dtype = requested or (DType.F32 if found == {DType.F64} and self._whole is None else None)
        """What config.json must state: the request's; float32 where the source states a float64 that is not kept."""

    def of(self, output: OutputTensor) -> DType:
        """Dtype of ``output``; integers keep theirs, float64 becomes float32 (MLX has none on the GPU).

        The logarithms of decays keep theirs too, as in mlx-lm: they are multiplied over the whole text.
        """
        own = self._checkpoint.tensors[output.pieces[0].source].dtype
        if not own.is_float:
            return own
        if self._whole is not None and (output.role is not Role.DECAY or own is DType.F64):
            return self._whole
        return DType.F32 if own is DType.F64 else own

    def notes(self) -> tuple[str, ...]:
        """Casts the source's dtypes do not suggest."""
        found = {ref.dtype for ref in self._checkpoint.tensors.values() if ref.dtype.is_float}
        if self._whole is not None and found - {self._whole}:
            names = ", ".join(sorted(dtype.value for dtype in found - {self._whole}))
            return (f"dense values and scales stored as {SHORT[self._whole]}; the source also holds {names}",)
        return ("float64 tensors stored as f32",) if DType.F64 in found else ()


def _declared(config: Mapping[str, Any]) -> DType | None:
    """mlx-lm's lookup: ``torch_dtype``, then ``text_config.dtype``; a top-level ``dtype`` changes nothing there."""
    text = config.get("text_config")
    name = config.get("torch_dtype") or (text.get("dtype") if isinstance(text, Mapping) else None)
    return _DTYPES.get(name) if isinstance(name, str) else None
