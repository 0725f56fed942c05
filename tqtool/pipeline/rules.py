"""Which quantizer each tensor gets: a default and ``GLOB=…`` rules, the last match wins.

A glob is matched against the mlx-lm module path (``model.layers.3.mlp.up_proj``), or the tensor's name when it is
not the weight of a module; ``*`` also crosses dots. Nothing is guessed: a glob that matches nothing, or asks for
what its module cannot be, is an error.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from tqtool.errors import UserError
from tqtool.formats.affine import AFFINE_BITS, AFFINE_GROUPS, FP_MODES, Mode
from tqtool.formats.dtypes import DType
from tqtool.solve.quantizer import Quantizer
from tqtool.solve.rtn import AffineRtn, FloatStore
from tqtool.source.mlx_lm_settings import is_router_at_eight_bits
from tqtool.transform.plan import OutputTensor, Role, TransformPlan

DEFAULT_BITS = 4
DEFAULT_GROUP = 64
ROUTER_BITS = 8
"""A router's logits decide which experts run, and it is a thousandth of the weights: never fewer bits unless asked."""
MODES: tuple[Mode, ...] = ("affine", "mxfp4", "nvfp4", "mxfp8")
FLOATS = {"bf16": DType.BF16, "f16": DType.F16, "f32": DType.F32}
_DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "fp16": "f16", "fp32": "f32"}
_KEYS = ("bits", "group", "mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Affine or floating-point packing, fully resolved."""

    bits: int
    group_size: int
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Stored as floats; ``dtype`` None means the model's own."""

    dtype: DType | None = None


Setting = Packed | Dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``glob`` → ``setting``, as the user wrote it in ``text``."""

    glob: str
    setting: Setting
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The resolved quantizer of every tensor, and remarks for the manifest."""

    quantizers: Mapping[str, Quantizer]
    notes: Mapping[str, tuple[str, ...]]

    def choose(self, output: OutputTensor) -> Quantizer:
        """The quantizer of ``output``."""
        return self.quantizers[output.name]

    def counted_notes(self) -> tuple[str, ...]:
        """The remarks for whoever reads the plan: one line each, with how many modules it is true of."""
        counts = Counter(note for lines in self.notes.values() for note in lines)
        return tuple(f"{count} module{'s' if count > 1 else ''} {note}" for note, count in counts.items())

    def main_bits(self, outputs: Sequence[OutputTensor]) -> int | None:
        """Bits at which more than half of the module weights are packed; None if there is no such number."""
        weights: Counter[int | None] = Counter()
        for output in outputs:
            if output.module is not None:
                entry = self.choose(output).config_entry()
                weights[entry["bits"] if isinstance(entry, dict) else None] += math.prod(output.shape)
        bits, count = weights.most_common(1)[0] if weights else (None, 0)
        return bits if 2 * count > weights.total() else None


def router_rules(transform: TransformPlan, packing: Packed | None, config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """``ROUTER_BITS`` for every router that ``packing`` would give fewer; the user's rules still win.

    mlx-lm does so whatever was asked for where the family says it (qwen3_moe), and packs the routers of others
    (mixtral) like the rest, which ``router_hints`` says.
    """
    if packing is None or (packing.bits >= ROUTER_BITS and not is_router_at_eight_bits(config)):
        return ()
    rules = []
    for output in transform.outputs:
        if output.role is Role.ROUTER and output.module is not None and output.shape[-1] % DEFAULT_GROUP == 0:
            text = f"{output.module}=bits:{ROUTER_BITS},group:{DEFAULT_GROUP}"
            setting = Packed(bits=ROUTER_BITS, group_size=DEFAULT_GROUP, mode="affine")
            rules.append(Rule(glob=output.module, setting=setting, text=text))
        elif output.role is Role.ROUTER and output.module is not None:
            rules.append(Rule(glob=output.module, setting=Dense(), text=f"{output.module}=float"))
    return tuple(rules)


def router_hints(
    transform: TransformPlan, packing: Packed | None, config: Mapping[str, Any], rules: Sequence[Rule]
) -> tuple[str, ...]:
    """A line where routers keep more bits than ``mlx_lm.convert`` gives them."""
    if packing is None or packing.bits >= ROUTER_BITS or is_router_at_eight_bits(config):
        return ()
    kept = [
        output for output in transform.outputs if output.role is Role.ROUTER and matching_rule(output, rules) is None
    ]
    if not kept or kept[0].module is None:
        return ()
    name = kept[0].module.rpartition(".")[2]
    return (
        f"{len(kept)} routers keep {ROUTER_BITS} bits, mlx_lm.convert would pack them at {packing.bits}; "
        f"--rule '*.{name}=bits:{packing.bits}' gives its bytes",
    )


def packed_setting(
    *, bits: int | None, group_size: int | None, mode: str | None, where: str = "", default: Packed | None = None
) -> Packed:
    """Fill in what was left out and refuse what MLX does not have.

    Left out: affine 4 bits in groups of 64 (or ``default``'s, when that is affine), the only pair of the other modes.

    Raises:
        UserError: the combination does not exist; ``where`` starts the message.
    """
    prefix = f"{where}: " if where else ""
    if mode is not None and mode not in MODES:
        raise UserError(f"{prefix}mode {mode!r} is unknown", hint=f"modes: {', '.join(MODES)}")
    if mode is not None and mode != "affine":
        only_bits, only_group = FP_MODES[mode]
        if bits not in (None, only_bits) or group_size not in (None, only_group):
            raise UserError(f"{prefix}{mode} is {only_bits} bits in groups of {only_group} and nothing else")
        return Packed(bits=only_bits, group_size=only_group, mode=_mode(mode))
    base = default if default is not None and default.mode == "affine" else None
    bits = bits if bits is not None else (base.bits if base else DEFAULT_BITS)
    group_size = group_size if group_size is not None else (base.group_size if base else DEFAULT_GROUP)
    if bits not in AFFINE_BITS:
        raise UserError(f"{prefix}{bits} bits: affine has {', '.join(map(str, AFFINE_BITS))}")
    if group_size not in AFFINE_GROUPS:
        raise UserError(f"{prefix}group size {group_size}: affine has {', '.join(map(str, AFFINE_GROUPS))}")
    return Packed(bits=bits, group_size=group_size, mode="affine")


def packed_entry(packed: Packed) -> dict[str, Any]:
    """``packed`` as mlx-lm's config says it."""
    return {"group_size": packed.group_size, "bits": packed.bits, "mode": packed.mode}


def parse_dtype(text: str, where: str = "dtype") -> DType:
    """``bf16``, ``f16``, ``f32`` or their long names."""
    name = _DTYPE_ALIASES.get(text, text)
    if name not in FLOATS:
        raise UserError(f"{where}: {text!r} is unknown", hint=f"dtypes: {', '.join(FLOATS)}")
    return FLOATS[name]


def parse_rule(text: str, default: Packed | None = None) -> Rule:
    """Parse ``GLOB=bits:8,group:32,mode:affine`` or ``GLOB=float|bf16|f16|f32``."""
    glob, equals, value = text.rpartition("=")
    if not equals or not glob or not value:
        raise UserError(f"rule {text!r}: expected GLOB=SETTING", hint="e.g. --rule 'lm_head=bits:8,group:32'")
    where = f"rule {text!r}"
    if ":" not in value:
        return Rule(glob=glob, text=text, setting=_dense(value, where))
    fields: dict[str, str] = {}
    for part in value.split(","):
        key, _, item = part.partition(":")
        if key not in _KEYS or not item or key in fields:
            raise UserError(f"{where}: cannot read {part!r}", hint=f"keys: {', '.join(_KEYS)}, each once")
        fields[key] = item
    setting = packed_setting(
        bits=_integer(fields.get("bits"), where),
        group_size=_integer(fields.get("group"), where),
        mode=fields.get("mode"),
        where=where,
        default=default,
    )
    return Rule(glob=glob, text=text, setting=setting)


def resolve(
    outputs: Sequence[OutputTensor],
    *,
    default: Setting,
    rules: Sequence[Rule],
    dtype_of: Callable[[OutputTensor], DType],
) -> Choices:
    """Choose a quantizer for every output.

    Args:
        outputs: All output tensors of the plan.
        default: Setting of module weights no rule matches; other tensors stay dense.
        rules: Last match wins.
        dtype_of: Dtype of dense values and of affine scales, per tensor.

    Raises:
        UserError: a glob matches nothing, only tensors it cannot apply to, or a module whose width it does not divide.
    """
    winners = {output.name: matching_rule(output, rules) for output in outputs}
    _require_matches(outputs, rules)
    quantizers: dict[str, Quantizer] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for output in outputs:
        rule = winners[output.name]
        setting = rule.setting if rule is not None else default
        dtype = dtype_of(output)
        if isinstance(setting, Dense) or output.module is None:
            own = setting.dtype if isinstance(setting, Dense) and rule is not None and dtype.is_float else None
            quantizers[output.name] = FloatStore(dtype=own or dtype)
        elif output.shape[-1] % setting.group_size:
            problem = f"input dimension {output.shape[-1]} is not divisible by group size {setting.group_size}"
            if rule is not None:
                raise UserError(f"rule {rule.text!r}: {output.module}: {problem}", hint="choose a smaller group")
            quantizers[output.name] = FloatStore(dtype=dtype)
            notes[output.name] = (f"kept dense: {problem}",)
        else:
            quantizers[output.name] = AffineRtn(
                bits=setting.bits, group_size=setting.group_size, mode=setting.mode, dtype=dtype
            )
        quantizers.update((part.name, quantizers[output.name]) for part in output.parts)
    return Choices(quantizers=quantizers, notes=notes)


def target_name(output: OutputTensor) -> str:
    """What globs are matched against."""
    return output.module if output.module is not None else output.name


def _applies(rule: Rule, output: OutputTensor) -> bool:
    """Packing rules look at modules only, so that ``*=bits:8`` does not mean norms."""
    if isinstance(rule.setting, Packed) and output.module is None:
        return False
    return fnmatchcase(target_name(output), rule.glob)


def matching_rule(output: OutputTensor, rules: Sequence[Rule]) -> Rule | None:
    """The rule that decides ``output``: the last that matches, or None."""
    return next((rule for rule in reversed(rules) if _applies(rule, output)), None)


def _require_matches(outputs: Sequence[OutputTensor], rules: Sequence[Rule]) -> None:
    for rule in rules:
        if any(_applies(rule, output) for output in outputs):
            continue
        if any(fnmatchcase(target_name(output), rule.glob) for output in outputs):
            raise UserError(f"rule {rule.text!r}: matches only tensors that cannot be packed (norms, biases)")
        near = near_names(rule.glob, [target_name(output) for output in outputs])
        raise UserError(f"rule {rule.text!r}: {rule.glob!r} matches no module", hint=f"near: {', '.join(near)}")


def near_names(glob: str, names: Sequence[str], limit: int = 4) -> list[str]:
    """Names most like ``glob``, layers folded into one: what the user may have meant."""
    patterns = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    stacks = [pattern for pattern in patterns if ".switch_mlp." in pattern]
    if "expert" in glob and "shared" not in glob and stacks:  # all experts of a layer are one module
        return stacks[:limit]
    wanted = re.sub(r"\.\d+\.", ".*.", glob).strip("*.")
    by_tail = {pattern: pattern.split(".")[-1] for pattern in patterns}
    close = difflib.get_close_matches(wanted, patterns, n=limit, cutoff=0.5)
    tails = difflib.get_close_matches(wanted.split(".")[-1], list(by_tail.values()), n=limit, cutoff=0.5)
    close += [pattern for pattern, tail in by_tail.items() if tail in tails and pattern not in close]
    return (close or patterns)[:limit]


def _dense(value: str, where: str) -> Dense:
    return Dense() if value == "float" else Dense(dtype=parse_dtype(value, where))


def _integer(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    if not text.isdigit():
        raise UserError(f"{where}: {text!r} is not a number")
    return int(text)


def _mode(text: str) -> Mode:
    modes: dict[str, Literal["affine", "mxfp4", "nvfp4", "mxfp8"]] = {mode: mode for mode in MODES}
    return modes[text]
