"""Sensitivities from a file: ours, OptiQ's ``sensitivity.json`` or EXL3's ``measurement.json``.

The last two do not say everything that ours does; what is assumed instead is in ``notes`` of the result.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tqtool.errors import UserError
from tqtool.formats.json_file import parse_json_object, read_file, read_json_object
from tqtool.formats.kmap import read_kmap
from tqtool.formats.sensitivity import FORMAT, Candidate, Group, Reference, Sensitivity, Value, parse, tie

SCALE_BITS = 32
"""A bf16 scale and a bf16 bias for each affine group."""


def read_sensitivity(path: Path, *, reference: Reference | None = None) -> Sensitivity:
    """Read a measurement.

    Args:
        path: The file.
        reference: How to take the values of an OptiQ file, which does not say; None detects it.

    Raises:
        UserError: it cannot be read or is none of the three, is damaged, or ``reference`` contradicts it.
    """
    data, where = read_file(path), str(path)
    body = parse_json_object(data, where)
    try:
        match kind_of(body):
            case "tqtool":
                found = parse(body, data, where)
            case "optiq":
                found = import_optiq(body, where, reference)
            case "exl3":
                found = import_exl3(body, where)
            case None:
                raise UserError(
                    f"{where}: neither a sensitivity file of tqtool or OptiQ nor a measurement.json of EXL3",
                    hint="make one with `tqtool sensitivity`",
                )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise UserError(f"{where}: {place}: {first['msg']}", hint="measure again") from error
    if reference not in (None, found.reference):
        raise UserError(f"{where}: was measured with reference {found.reference}", hint="leave --reference out")
    return found


def read_kmap_or_sensitivity(path: Path | None, budget: float | None) -> tuple[dict[str, int], Sensitivity | None]:
    """What ``--k-map`` names: a k-map, or with ``budget`` a measurement to make one from.

    Raises:
        UserError: see ``read_kmap``, ``read_sensitivity``; a budget without a measurement, or one without the other.
    """
    hint = "tqtool sensitivity makes a measurement; tqtool kmap spends a budget on it"
    if path is None:
        if budget is not None:
            raise UserError("--k-budget without --k-map: nothing says where bits help most", hint=hint)
        return {}, None
    if kind_of(read_json_object(path)) is None:
        if budget is not None:
            raise UserError(f"--k-budget: {path} is a k-map, its bits are decided already", hint=hint)
        return read_kmap(path), None
    if budget is None:
        raise UserError(f"{path}: sensitivities, which need a budget", hint="add --k-budget 3.0, for example")
    return {}, read_sensitivity(path)


def kind_of(body: dict[str, Any]) -> Literal["tqtool", "optiq", "exl3"] | None:
    """Whose measurement ``body`` is; None if it is something else."""
    if body.get("format") == FORMAT:
        return "tqtool"
    if isinstance(body.get("layers"), list):
        return "optiq"
    return "exl3" if isinstance(body.get("groups"), list) else None


def import_optiq(body: dict[str, Any], where: str, reference: Reference | None) -> Sensitivity:
    """OptiQ's file; ``reference`` None is told from whether the values rise or fall with the bits.

    Raises:
        UserError: it is malformed, or its values neither rise nor fall.
    """
    try:
        bits = sorted(_integer(value) for value in body["candidate_bits"])
        size = None if body.get("group_size") is None else _integer(body["group_size"])
        if size is not None and size < 1:
            raise ValueError(f"group_size {size}")
        rows = {
            str(row["layer_name"]): (
                _integer(row["param_count"]),
                {each: _number(row["sensitivities"][str(each)]) for each in bits},
            )
            for row in body["layers"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a sensitivity file of OptiQ ({_reason(error)})") from error
    if len(rows) != len(body["layers"]) or len(bits) < 2:
        raise UserError(f"{where}: a layer twice, or fewer than two candidate_bits")
    mode = reference or _detect(rows, bits, where)
    own = bits[0 if mode == "low" else -1]
    notes = [] if reference else [f"reference {mode}: the file does not say; its values tell by their direction"]
    offset = max(abs(values[own]) for _, values in rows.values())
    if offset:
        notes.append(f"values are relative to the one at {own} bits, which the file has at up to {offset:.3g}")
    if size is None:
        notes.append("no group_size: true bits are unknown")
    groups = [_optiq_group(names, rows, bits, own, size) for names in tie(list(rows))]
    if any(len(group.modules) > 1 for group in groups):
        notes.append("gate_proj and up_proj were measured apart: their values are added")
    rates = {each: None if size is None else each + SCALE_BITS / size for each in bits}
    return Sensitivity(
        base_model=str(body["base_model"]) if body.get("base_model") else None,
        candidate_bits=bits,
        group_size=size,
        reference=mode,
        reference_kl=None,
        candidates=[_foreign(each, "affine", size, rates[each]) for each in bits],
        groups=groups,
        source_sample_sha256=None,
        transforms=[],
        protected=[],
        teacher=None,
        tools={},
        notes=notes,
    )


def import_exl3(body: dict[str, Any], where: str) -> Sensitivity:
    """EXL3's file: changes of KL from its lowest model, hence ``low``.

    It names no weight counts. With K whole for every model they follow from the storage: Δbits / ΔK.

    Raises:
        UserError: it is malformed, or its models mix rates.
    """
    try:
        rates = [_number(body["base"]["bpw"]), *(_number(alternative["bpw"]) for alternative in body["alts"])]
        bits = [round(rate) for rate in rates]
        if any(low >= high for low, high in pairwise(bits)):
            raise ValueError(f"models of {bits} bits: expected rising ones")
        kl = Value(mean=_number(body["base_kld"]), standard_error=None)
        groups = [_exl3_group(row, bits, where) for row in body["groups"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a measurement.json of EXL3 ({_reason(error)})") from error
    return Sensitivity(
        base_model=None,
        candidate_bits=bits,
        group_size=None,
        reference="low",
        reference_kl=kl,
        candidates=[_foreign(each, "exl3", None, rate) for each, rate in zip(bits, rates, strict=True)],
        groups=groups,
        source_sample_sha256=None,
        transforms=[],
        protected=[],
        teacher=None,
        tools={},
        notes=["weights of a group: its bits over the lowest model, divided by the rates' difference"],
    )


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _detect(rows: dict[str, tuple[int, dict[int, float]]], bits: list[int], where: str) -> Reference:
    rise = sum(values[bits[-1]] - values[bits[0]] for _, values in rows.values())
    if rise == 0:
        raise UserError(f"{where}: its values neither rise nor fall with the bits", hint="say --reference low or high")
    return "low" if rise > 0 else "high"


def _optiq_group(
    names: list[str], rows: dict[str, tuple[int, dict[int, float]]], bits: list[int], own: int, size: int | None
) -> Group:
    values = {each: sum(rows[name][1][each] - rows[name][1][own] for name in names) for each in bits}
    return Group(
        modules=names,
        param_counts=[rows[name][0] for name in names],
        values={str(each): Value(mean=value, standard_error=None) for each, value in values.items()},
        bits_per_weight={} if size is None else {str(each): each + SCALE_BITS / size for each in bits},
    )


def _exl3_group(row: dict[str, Any], bits: list[int], where: str) -> Group:
    names = [str(name) for name in row["layers"]]
    if not names:
        raise ValueError("a group without layers")
    gains = {str(bits[0]): 0.0}
    counts = set()
    for each, candidate in zip(bits[1:], row["candidates"], strict=True):
        gains[str(each)] = -_number(candidate["dkld"])
        weights, rest = divmod(_integer(candidate["dbits"]), each - bits[0])
        counts.add(weights if rest == 0 else None)
    total = counts.pop()
    if counts or total is None:
        raise UserError(f"{where}: {names[0]}: a model mixes rates, so its weights cannot be told from its bits")
    share, more = divmod(total, len(names))
    return Group(
        modules=names,
        param_counts=[share + (index < more) for index in range(len(names))],
        values={each: Value(mean=gain, standard_error=None) for each, gain in gains.items()},
        bits_per_weight={},
    )


def _foreign(bits: int, mode: str, group_size: int | None, rate: float | None) -> Candidate:
    return Candidate(bits=bits, mode=mode, group_size=group_size, bits_per_weight=rate, manifest_sha256=None)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, found {str(value)[:40]!r}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"expected a number, found {str(value)[:40]!r}")
    return float(value)
