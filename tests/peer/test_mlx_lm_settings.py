"""Settings that mlx-lm lacks, requires or reads in its own way: the claim, and mlx-lm itself as its witness."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.oracles.decoder import random_config
from tests.support.conversions import convert
from tests.support.conversions import plan as planned
from tests.support.family_parity import TOKENS, mlx_logits, transformers_logits
from tests.support.stock import stock_convert
from tests.support.tensors import raw_tensors
from tests.support.tiny_families import CASES, write_family
from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.rules import DEFAULT_GROUP, ROUTER_BITS
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.mlx_lm import behaviour_warnings, refuse_unservable
from tqtool.source.mlx_lm_settings import eight_bit_modules, rotary_warnings, setting_refusal, stated_defaults
from tqtool.transform.families import FAMILIES, LAYER_NORM_REFUSAL, POST_NORM_REFUSAL, REFUSED_ROTATION

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

GRANITE = {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": 1e4, "max_position_embeddings": 512}
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


def arguments(config: dict[str, Any]) -> Any:
    """What mlx-lm makes of a config."""
    return importlib.import_module(f"mlx_lm.models.{config['model_type']}").ModelArgs.from_dict(config)


def phi3(scaling: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return random_config("phi3", rope_scaling=scaling, num_attention_heads=3, num_key_value_heads=1, **changes)


# ------------------------------------------------------------------------------------------------- what is left out
def test_what_granite_may_leave_out_is_stated() -> None:
    config = random_config("granite", **GRANITE)
    for name in ("attention_multiplier", "logits_scaling"):
        del config[name]
    with pytest.raises(TypeError, match=r"attention_bias.*|.*logits_scaling"):
        arguments(config)
    stated = stated_defaults(config)
    assert stated == {
        "attention_multiplier": 1.0, "logits_scaling": 1.0, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    assert arguments(config | stated).logits_scaling == 1.0
    assert stated_defaults(config | stated) == {}


def test_what_qwen3_may_leave_out_is_stated() -> None:
    config = random_config("qwen3", rope_theta=1e4, max_position_embeddings=512)
    del config["head_dim"]
    with pytest.raises(TypeError, match="head_dim"):
        arguments(config)
    assert arguments(config | stated_defaults(config)).head_dim == 128
    assert stated_defaults(random_config("llama")) == {}


def test_the_artifact_says_what_the_source_left_out(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", CASES["granite"])
    config = json.loads((source / "config.json").read_text())
    neutral = {"residual_multiplier": 1.0, "logits_scaling": 1.0}
    assert neutral.keys() <= config.keys()
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in neutral}))
    warnings = open_checkpoint(str(source)).warnings
    assert "config.json: residual_multiplier, logits_scaling stated as mlx-lm needs it" in warnings
    plan_convert(ConvertRequest(source=str(source), out=tmp_path / "out", dtype=DType.F32)).run()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in neutral} == neutral
    expected, found = transformers_logits(source), mlx_logits(tmp_path / "out")
    assert np.abs(found - expected).max() < 5e-5 * np.abs(expected).max()


# ------------------------------------------------------------------------------------------- what convert decides alone
def test_what_mlx_lm_packs_at_8_bits_in_any_case_is_a_hint_with_its_rules(tmp_path: Path) -> None:
    write_family(tmp_path / "source", CASES["granite"])
    plan_convert(ConvertRequest(source=str(tmp_path / "source"), out=tmp_path / "dense", dtype=DType.BF16)).run()
    plan = planned(tmp_path / "dense", tmp_path / "out", rotation_seed=42)  # its head is untied
    hint = plan.plan.hints[-1]
    assert "mlx_lm.convert packs *.o_proj, *.down_proj, lm_head of granite at 8 bits in any case" in hint
    tied = planned(tmp_path / "dense", tmp_path / "out").plan.hints[-1]
    rules = tuple(re.findall(r"--rule '(.*?)'", tied))
    assert [rule.partition("=")[0] for rule in rules] == ["*.o_proj", "*.down_proj"]
    stock_convert([(tmp_path / "dense", tmp_path / "stock", {"quantize": True, "q_bits": 4, "q_group_size": 64})])
    convert(tmp_path / "dense", tmp_path / "ours", rules=rules)
    assert raw_tensors(tmp_path / "ours") == raw_tensors(tmp_path / "stock")


HYBRIDS = ["qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_what_mlx_lm_s_hybrids_keep_from_casts_is_kept(tmp_path: Path, model_type: str) -> None:
    """I27: the logarithms of decays stay float32 in a bfloat16 artifact, and nothing else is protected."""
    text_model = importlib.import_module("mlx_lm.models.qwen3_5").TextModel
    predicate = text_model.cast_predicate.fget(None)
    decide = text_model.quant_predicate.fget
    assert decide(SimpleNamespace(args=SimpleNamespace(num_experts=0))) is None
    router = decide(SimpleNamespace(args=SimpleNamespace(num_experts=6)))
    for module in ("mlp.gate", "mlp.shared_expert_gate"):
        assert router(f"language_model.model.layers.0.{module}", None) == {
            "group_size": DEFAULT_GROUP,
            "bits": ROUTER_BITS,
        }
    assert router("language_model.model.layers.0.mlp.switch_mlp.gate_proj", None) is True
    source = write_family(tmp_path / "source", CASES[model_type])
    plan_convert(ConvertRequest(source=str(source), out=tmp_path / "out", dtype=DType.BF16)).run()
    dtypes = {name: dtype for name, (dtype, _, _) in raw_tensors(tmp_path / "out").items()}
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {n for n in dtypes if not predicate(n)}
    assert set(dtypes.values()) == {"F32", "BF16"}


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in HYBRIDS])
def test_no_other_model_of_mlx_lm_decides_bits_or_casts_alone(model_type: str) -> None:
    """A family whose model brings a predicate is to be looked at: what it protects, the user must be told."""
    from mlx_lm.utils import MODEL_REMAPPING

    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    assert not hasattr(module.Model, "cast_predicate")
    if model_type == "qwen3_moe":  # the router, as ``router_rules`` has it for every family
        predicate = module.Model.quant_predicate.fget(None)
        assert predicate("model.layers.0.mlp.gate", None) == {"group_size": DEFAULT_GROUP, "bits": ROUTER_BITS}
        assert predicate("model.layers.0.mlp.switch_mlp.gate_proj", None) is True
        return
    assert hasattr(module.Model, "quant_predicate") is bool(eight_bit_modules({"model_type": model_type}))


# ------------------------------------------------------------------------------------------------- what is not there
@pytest.mark.parametrize("model_type", ["granite", "mixtral", "phi3", "qwen2"])
def test_a_head_dim_that_mlx_lm_does_not_read_is_refused(model_type: str) -> None:
    config = random_config(model_type, **GRANITE, head_dim=16, attention_bias=False, mlp_bias=False)
    assert not hasattr(arguments(config), "head_dim")
    assert f"head_dim is 16; mlx-lm's {model_type} has only hidden_size / num_attention_heads, 12" in str(
        setting_refusal(config)
    )
    with pytest.raises(SourceError, match=r"head_dim is 16.*\n.*nothing can run this model in mlx-lm yet"):
        refuse_unservable(Path("m"), config)
    for agreed in ({"head_dim": 12}, {"head_dim": None}):
        assert setting_refusal(config | agreed) is None


def test_llama_and_mistral_have_their_own_head_dim() -> None:
    for model_type in ("llama", "mistral", "qwen3", "smollm3"):
        assert setting_refusal(random_config(model_type, head_dim=16)) is None
    assert arguments(random_config("llama", head_dim=16)).head_dim == 16


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "llama3"])
def test_positions_that_mlx_lm_s_phi3_ignores_are_refused(kind: str) -> None:
    config = phi3({"type": kind, "factor": 4.0, **FACTORS})
    assert arguments(config).rope_scaling is None
    assert f"rope_scaling is '{kind}'; mlx-lm's phi3 knows longrope and su" in str(setting_refusal(config))


@pytest.mark.parametrize("scaling", [{"rope_type": "llama3", "factor": 8.0}, {"type": "linear", "factor": 2.0}])
def test_positions_that_mlx_lm_s_phi3_does_not_load_are_refused(scaling: dict[str, Any]) -> None:
    config = phi3(scaling)
    with pytest.raises(ValueError, match="rope_scaling must contain keys"):
        arguments(config)
    assert "mlx-lm's phi3 knows longrope and su" in str(setting_refusal(config))


def test_the_newer_name_of_the_kind_is_repeated_where_mlx_lm_s_phi3_reads_it() -> None:
    config = phi3({"rope_type": "longrope", **FACTORS})
    with pytest.raises(ValueError, match="rope_scaling must contain keys"):
        arguments(config)
    whole = config | stated_defaults(config)
    assert arguments(whole).rope_scaling["type"] == "longrope"
    assert setting_refusal(whole) is None
    assert stated_defaults(whole) == {}
    assert stated_defaults(random_config("llama", rope_scaling={"rope_type": "llama3"})) == {}


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_served_and_must_be_whole(kind: str) -> None:
    config = phi3({"type": kind, **FACTORS})
    assert arguments(config).rope_scaling["type"] == kind
    assert setting_refusal(config) is None
    assert setting_refusal(phi3(None)) is None
    half = phi3({"type": kind, "long_factor": [2.0] * 6})
    assert setting_refusal(half) == f"rope_scaling {kind!r} lacks short_factor"


# ---------------------------------------------------------------------------------------------- what is read otherwise
def test_short_texts_under_longrope_differ_in_mlx_lm_and_it_is_said(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", CASES["phi3 longrope"])
    (said,) = (line for line in open_checkpoint(str(source)).warnings if "longrope" in line)
    assert "uses long_factor at every length, the authors' code only beyond 16 tokens" in said
    plan_convert(ConvertRequest(source=str(source), out=tmp_path / "dense", dtype=DType.F32)).run()
    for tokens, differ in ((TOKENS, False), (TOKENS[:16], True)):
        expected, found = transformers_logits(source, tokens), mlx_logits(tmp_path / "dense", tokens)
        assert bool(np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()) is differ


def test_the_attention_scale_of_longrope() -> None:
    same = {"short_factor": [2.0] * 6, "long_factor": [2.0] * 6}
    sizes = {"original_max_position_embeddings": 64, "max_position_embeddings": 512}
    assert rotary_warnings(phi3({"type": "longrope", **same}, **sizes)) == ()
    assert rotary_warnings(phi3({"type": "longrope", **same, "factor": 8.0}, **sizes)) == ()
    own = (1 + np.log(8) / np.log(64)) ** 0.5
    for told in ({"attention_factor": 1.5}, {"factor": 4.0}, {"factor": 1.0}):
        (line,) = rotary_warnings(phi3({"type": "longrope", **same, **told}, **sizes))
        assert f"mlx-lm's phi3 takes {own:.6g}" in line
    rope_utils = importlib.import_module("mlx_lm.models.rope_utils")
    assert rope_utils.SuScaledRoPE(12, 1e4, 512, 64, 1.0, 1.0)._scale == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize(
    ("model_type", "changes", "is_said"),
    [
        ("phi3", {"sliding_window": 2047}, True),
        ("phi3", {"sliding_window": None}, False),
        ("mistral", {"sliding_window": 4096}, True),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, False),
        ("smollm3", {"sliding_window": 64, "use_sliding_window": True}, True),
        ("smollm3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention"]}, False),
        ("smollm3", {"sliding_window": 64, "use_sliding_window": False}, False),
    ],
)
def test_windows_that_mlx_lm_ignores_are_said(model_type: str, changes: dict[str, Any], is_said: bool) -> None:
    lines = behaviour_warnings(random_config(model_type, **changes))
    assert any("attends to all" in line for line in lines) is is_said


@pytest.mark.parametrize("model_type", ["phi3", "granite", "smollm3"])
def test_another_activation_is_said(model_type: str) -> None:
    assert any(
        "hidden_act is 'gelu'" in line for line in behaviour_warnings(random_config(model_type, hidden_act="gelu"))
    )
    assert behaviour_warnings(random_config(model_type, hidden_act="silu")) == ()


@pytest.mark.parametrize("model_type", [name for name, why in REFUSED_ROTATION.items() if why is LAYER_NORM_REFUSAL])
def test_what_is_refused_for_its_layer_norms_has_them(model_type: str) -> None:
    text = Path(str(importlib.import_module(f"mlx_lm.models.{model_type}").__file__)).read_text()
    assert "nn.LayerNorm(" in text
    assert "nn.RMSNorm(" not in text


WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}


@pytest.mark.parametrize("model_type", [name for name, why in REFUSED_ROTATION.items() if why is POST_NORM_REFUSAL])
def test_what_is_refused_for_its_post_norms_has_them(model_type: str) -> None:
    """A norm between what the MLP writes and the residual stream; families that can be rotated have none."""
    for name, has_them in ((WRAPPERS.get(model_type, model_type), True), ("llama", False)):
        text = Path(str(importlib.import_module(f"mlx_lm.models.{name}").__file__)).read_text()
        assert bool(re.search(r"self\.post_(feedforward|mlp)_layernorm\(", text)) is has_them
