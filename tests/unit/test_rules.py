"""Rules: parsing, last match wins, and every way a rule can be wrong."""

from __future__ import annotations

import re

import pytest

from tqtool.errors import UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.rules import Dense, Packed, near_names, packed_setting, parse_dtype, parse_rule, resolve
from tqtool.solve.rtn import AffineRtn, FloatStore
from tqtool.transform.plan import OutputTensor, Role

Q4 = Packed(bits=4, group_size=64, mode="affine")


def outputs() -> list[OutputTensor]:
    def weight(module: str, width: int = 128, role: Role = Role.OTHER) -> OutputTensor:
        name = f"{module}.weight"
        return OutputTensor(name=name, source=name, shape=(64, width), module=module, role=role)

    modules = [weight("model.embed_tokens", role=Role.EMBEDDING)]
    for layer in range(3):
        modules += [
            weight(f"model.layers.{layer}.self_attn.q_proj"),
            weight(f"model.layers.{layer}.mlp.down_proj", 96 if layer == 1 else 128),
        ]
    norm = OutputTensor(name="model.norm.weight", source="model.norm.weight", shape=(128,), role=Role.NORM)
    return [*modules, norm]


def labels(*rules: str, default: Packed | Dense = Q4, dtype: DType = DType.BF16) -> dict[str, str]:
    base = default if isinstance(default, Packed) else None
    parsed = [parse_rule(text, base) for text in rules]
    choices = resolve(outputs(), default=default, rules=parsed, dtype_of=lambda output: dtype)
    return {output.module or output.name: choices.choose(output).label for output in outputs()}


def test_default_packs_every_divisible_module() -> None:
    found = labels()
    assert found["model.embed_tokens"] == "affine4 g64"
    assert found["model.layers.2.mlp.down_proj"] == "affine4 g64"
    assert found["model.norm.weight"] == "bf16"


def test_indivisible_width_stays_dense_with_a_note() -> None:
    choices = resolve(outputs(), default=Q4, rules=[], dtype_of=lambda output: DType.BF16)
    assert choices.notes == {
        "model.layers.1.mlp.down_proj.weight": ("kept dense: input dimension 96 is not divisible by group size 64",)
    }
    assert isinstance(choices.quantizers["model.layers.1.mlp.down_proj.weight"], FloatStore)


def test_indivisible_width_is_an_error_where_the_user_named_it() -> None:
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj: input dimension 96 is not divisible"):
        labels("*down_proj=bits:8")
    assert labels("*down_proj=bits:8,group:32")["model.layers.1.mlp.down_proj"] == "affine8 g32"


def test_last_match_wins() -> None:
    rules = ["*q_proj=bits:8", "model.layers.2.*=bits:2,group:32", "model.layers.2.self_attn.q_proj=f32"]
    found = labels(*rules)
    assert found["model.layers.0.self_attn.q_proj"] == "affine8 g64"
    assert found["model.layers.2.mlp.down_proj"] == "affine2 g32"
    assert found["model.layers.2.self_attn.q_proj"] == "f32"
    again = labels(*reversed(rules))
    assert again["model.layers.2.self_attn.q_proj"] == "affine8 g64"


def test_packing_rules_leave_norms_alone_and_float_rules_do_not() -> None:
    assert labels("*=bits:8,group:32")["model.norm.weight"] == "bf16"
    assert labels("*=f32")["model.norm.weight"] == "f32"
    assert labels("model.norm.weight=f32")["model.norm.weight"] == "f32"


def test_float_without_a_dtype_means_the_models_own() -> None:
    assert labels("model.embed_tokens=float", dtype=DType.F16)["model.embed_tokens"] == "f16"
    assert labels("model.embed_tokens=bf16", dtype=DType.F16)["model.embed_tokens"] == "bf16"


def test_rules_alone_pack_only_what_they_name() -> None:
    found = labels("*q_proj=bits:4", default=Dense())
    assert found["model.layers.0.self_attn.q_proj"] == "affine4 g64"
    assert found["model.embed_tokens"] == "bf16"


def test_scales_take_the_models_dtype() -> None:
    choices = resolve(outputs(), default=Q4, rules=[], dtype_of=lambda output: DType.F16)
    quantizer = choices.quantizers["model.embed_tokens.weight"]
    assert isinstance(quantizer, AffineRtn)
    assert quantizer.dtype is DType.F16


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("a=bits:8", Packed(bits=8, group_size=64, mode="affine")),
        ("a=group:32", Packed(bits=4, group_size=32, mode="affine")),
        ("a=bits:3,group:128,mode:affine", Packed(bits=3, group_size=128, mode="affine")),
        ("a=mode:nvfp4", Packed(bits=4, group_size=16, mode="nvfp4")),
        ("a=mode:mxfp8", Packed(bits=8, group_size=32, mode="mxfp8")),
        ("a=b=float", Dense()),
        ("a=float16", Dense(dtype=DType.F16)),
    ],
)
def test_parse(text: str, setting: Packed | Dense) -> None:
    assert parse_rule(text).setting == setting
    assert parse_rule(text).text == text


def test_a_rule_inherits_the_jobs_affine_setting_but_not_a_float_one() -> None:
    wide = Packed(bits=3, group_size=128, mode="affine")
    assert parse_rule("a=bits:8", wide).setting == Packed(bits=8, group_size=128, mode="affine")
    mxfp4 = Packed(bits=4, group_size=32, mode="mxfp4")
    assert parse_rule("a=bits:8", mxfp4).setting == Packed(bits=8, group_size=64, mode="affine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lm_head", "expected GLOB=SETTING"),
        ("=bits:8", "expected GLOB=SETTING"),
        ("a=", "expected GLOB=SETTING"),
        ("a=int8", "'int8' is unknown"),
        ("a=bits:x", "'x' is not a number"),
        ("a=bits:-4", "'-4' is not a number"),
        ("a=bits:7", "7 bits: affine has 1, 2, 3, 4, 5, 6, 8"),
        ("a=bits:8,bits:4", "cannot read 'bits:4'"),
        ("a=width:8", "cannot read 'width:8'"),
        ("a=bits:8,", "cannot read ''"),
        ("a=group:48", "group size 48: affine has 32, 64, 128"),
        ("a=mode:int4", "mode 'int4' is unknown"),
        ("a=mode:mxfp4,bits:8", "mxfp4 is 4 bits in groups of 32 and nothing else"),
    ],
)
def test_malformed_rules(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_rule(text)
    assert caught.value.exit_code == 2


def test_a_glob_that_matches_nothing_lists_near_names() -> None:
    with pytest.raises(UserError, match="matches no module") as caught:
        labels("*.q_prj=bits:8")
    assert "model.layers.*.self_attn.q_proj" in (caught.value.hint or "")
    with pytest.raises(UserError, match="matches no module"):
        labels("model.layers.7.*=bits:8")


def test_a_packing_rule_on_a_norm_says_so() -> None:
    with pytest.raises(UserError, match="matches only tensors that cannot be packed"):
        labels("model.norm.*=bits:8")


def test_near_names_without_likeness_still_shows_something() -> None:
    assert near_names("zzz", ["a.0.b", "a.1.b"]) == ["a.*.b"]


@pytest.mark.parametrize(
    ("bits", "group", "mode", "expected"),
    [
        (None, None, None, Q4),
        (8, None, None, Packed(bits=8, group_size=64, mode="affine")),
        (None, None, "mxfp8", Packed(bits=8, group_size=32, mode="mxfp8")),
        (4, 16, "nvfp4", Packed(bits=4, group_size=16, mode="nvfp4")),
    ],
)
def test_defaults_are_mlx_lms(bits: int | None, group: int | None, mode: str | None, expected: Packed) -> None:
    assert packed_setting(bits=bits, group_size=group, mode=mode) == expected


def test_dtype_names() -> None:
    assert parse_dtype("bfloat16") is DType.BF16
    with pytest.raises(UserError, match="--dtype: 'int8' is unknown"):
        parse_dtype("int8", "--dtype")
