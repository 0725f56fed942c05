"""Does ``config.json`` describe the tensors that are there? Shapes, dtypes, names; no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tqtool.artifact.reader import Artifact, affine_spec
from tqtool.errors import ArtifactError
from tqtool.formats.affine import AffineSpec
from tqtool.formats.dtypes import DType
from tqtool.formats.manifest import MANIFEST_NAME, TensorRecord, short
from tqtool.formats.trellis import TrellisSpec, specs_from_config
from tqtool.solve.quantizer import ConfigEntry

_TOP_KEYS = ("group_size", "bits", "mode")


def config_entries(artifact: Artifact) -> dict[str, ConfigEntry]:
    """Module path → what config.json says of it; None for a trellis module, False for a dense one.

    Raises:
        ArtifactError: a value of another type than it must have, or no entry for a module of the manifest.
    """
    quantization = _quantization(artifact)
    trellis = specs_from_config(dict(artifact.config))
    entries: dict[str, ConfigEntry] = {}
    for record in artifact.manifest.tensors:
        if record.module is None:
            continue
        if record.name != f"{record.module}.weight":
            raise ArtifactError(f"{MANIFEST_NAME}: {record.name} is not the weight of {record.module}, its module")
        if record.module in trellis:
            entries[record.module] = None
        elif not quantization:
            entries[record.module] = False
        elif record.module in quantization:
            entries[record.module] = _entry(record.module, quantization[record.module])
        else:
            raise ArtifactError(f"config.json: quantization has no entry for {record.module}")
    return entries


def _quantization(artifact: Artifact) -> Mapping[str, Any]:
    """The ``quantization`` object, empty if config.json has none."""
    value = artifact.config.get("quantization", {})
    if not isinstance(value, dict):
        raise ArtifactError(f"config.json: quantization: expected an object, found {short(value)}")
    return value


def _entry(module: str, value: Any) -> dict[str, Any] | Literal[False]:
    if value is False:
        return False
    if not isinstance(value, dict):
        raise ArtifactError(f"config.json: quantization of {module}: expected false or an object, found {short(value)}")
    affine_spec(module, value)
    return value


def config_problems(artifact: Artifact, entries: Mapping[str, ConfigEntry]) -> list[str]:
    """Disagreements between config.json and the shards, one line each."""
    problems = _section_problems(artifact, entries)
    trellis = specs_from_config(dict(artifact.config))
    for record in artifact.manifest.tensors:
        if record.module is None:
            continue
        entry = entries[record.module]
        if entry is None:
            problems += _shape_problems(record, trellis[record.module])
            expected = _trellis_tensors(record.module, trellis[record.module])
        elif entry is False:
            expected = {record.name: (None, tuple(record.shape))}
        else:
            expected = _affine_tensors(record, affine_spec(record.module, entry))
        problems += _tensor_problems(artifact, record.module, expected)
    return problems


Expected = dict[str, tuple[DType | None, tuple[int, ...]]]
"""Tensor name → dtype (None: any float) and shape."""


def _section_problems(artifact: Artifact, entries: Mapping[str, ConfigEntry]) -> list[str]:
    quantization = _quantization(artifact)
    if artifact.config.get("quantization") != artifact.config.get("quantization_config"):
        return ["config.json: quantization and quantization_config differ"]
    if not quantization:
        return _trellis_problems(artifact, entries)
    problems = _trellis_problems(artifact, entries)
    problems += [f"config.json: quantization lacks {key}" for key in _TOP_KEYS if key not in quantization]
    if not problems:
        affine_spec("every other module", {key: quantization[key] for key in _TOP_KEYS})
    unknown = sorted(set(quantization) - set(entries) - set(_TOP_KEYS))
    problems += [f"config.json: quantization names {path}, which is no module of the manifest" for path in unknown]
    trellis_too = sorted(path for path, entry in entries.items() if entry is None and path in quantization)
    problems += [f"config.json: {path} is under trellis and under quantization" for path in trellis_too]
    return problems


def _trellis_problems(artifact: Artifact, entries: Mapping[str, ConfigEntry]) -> list[str]:
    unknown = sorted(set(specs_from_config(dict(artifact.config))) - set(entries))
    return [f"config.json: trellis names {path}, which is no module of the manifest" for path in unknown]


def _shape_problems(record: TensorRecord, spec: TrellisSpec) -> list[str]:
    served = list(spec.served_shape)
    if served == record.shape:
        return []
    return [f"config.json: trellis serves {record.module} as {served}, the manifest says {record.shape}"]


def _affine_tensors(record: TensorRecord, spec: AffineSpec) -> Expected:
    if not record.shape:
        raise ArtifactError(f"{record.module}: the manifest calls it a single number, config.json packs it in groups")
    *lead, width = record.shape
    if width % spec.group_size:
        raise ArtifactError(f"{record.module}: {record.shape} is not divisible by group size {spec.group_size}")
    groups = (*lead, spec.groups(width))
    expected: Expected = {f"{record.module}.weight": (DType.U32, (*lead, spec.words(width)))}
    if spec.mode == "affine":
        expected[f"{record.module}.scales"] = expected[f"{record.module}.biases"] = (None, groups)
    else:
        expected[f"{record.module}.scales"] = (DType.U8, groups)
    return expected


def _trellis_tensors(module: str, spec: TrellisSpec) -> Expected:
    return {f"{module}.weight": (DType.U32, spec.words_shape), f"{module}.scales": (DType.F16, spec.scales_shape)}


def _tensor_problems(artifact: Artifact, module: str, expected: Expected) -> list[str]:
    problems = []
    for name, (dtype, shape) in expected.items():
        ref = artifact.tensors.get(name)
        if ref is None:
            problems.append(f"{name}: config.json needs it and no shard holds it")
            continue
        fits = ref.dtype.is_float if dtype is None else ref.dtype is dtype
        if not fits or ref.shape != shape:
            wanted = f"{'a float' if dtype is None else dtype.value} {list(shape)}"
            problems.append(f"{name}: {ref.dtype.value} {list(ref.shape)}, config.json says {wanted}")
    present = {f"{module}.{part}" for part in ("weight", "scales", "biases")} & set(artifact.tensors)
    problems += [f"{name}: config.json does not expect it" for name in sorted(present - set(expected))]
    return problems
