"""Rotary settings of transformers 5 repeated where mlx-lm reads them; conflicts refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import write_tiny
from tqtool.errors import SourceError
from tqtool.source.checkpoint import ROPE_WARNING, open_checkpoint
from tqtool.source.config import rope_updates
from tqtool.source.mlx_lm import behaviour_warnings
from tqtool.source.mlx_lm_settings import setting_refusal

PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LAYERED = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, "sliding_attention": PLAIN}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing to say": ({}, {}),
    "as transformers 4 wrote it": ({"rope_theta": 1e6, "rope_scaling": None}, {}),
    "base only": ({"rope_parameters": PLAIN}, {"rope_theta": 500000.0}),
    "both, the same": ({"rope_parameters": PLAIN, "rope_theta": 500000.0}, {}),
    "scaled": (
        {"rope_parameters": LLAMA3, "rope_scaling": None},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        },
    ),
    "scaled, both the same": (
        {
            "rope_parameters": LLAMA3,
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        },
        {},
    ),
    "by kind of layer": (
        {"rope_parameters": LAYERED},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0},
            "rope_local_base_freq": 500000.0,
        },
    ),
    "partly rotated": (
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    ),
    "nested": (
        {"text_config": {"hidden_size": 8, "rope_parameters": PLAIN}},
        {"text_config": {"hidden_size": 8, "rope_parameters": PLAIN, "rope_theta": 500000.0}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_added(case: str) -> None:
    config, expected = CASES[case]
    assert rope_updates(config) == expected
    assert rope_updates({**config, **expected}) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 10000.0}, r"rope_theta is 10000.0, but rope_parameters says 500000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, r"rope_scaling is .*linear.*, but rope_parameters says"),
    ],
)
def test_conflicts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        rope_updates({"rope_parameters": LLAMA3, **changes})


def test_an_opened_checkpoint_has_them_and_says_so(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": PLAIN}))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config["rope_theta"] == 500000.0
    assert checkpoint.config["rope_parameters"] == PLAIN
    assert checkpoint.warnings == (ROPE_WARNING,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 3}, "needs at least sliding_window_pattern, 6"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.4, "head_dim": 64}, "25 of 64 dimensions"),
        (
            {
                "model_type": "qwen3_5",
                "text_config": {
                    "model_type": "qwen3_5_text",
                    "rope_parameters": {"partial_rotary_factor": 0.4},
                    "head_dim": 64,
                },
            },
            "25 of 64 dimensions",
        ),
        ({"model_type": "granite", "embedding_multiplier": "x"}, "embedding_multiplier is 'x': expected a number"),
    ],
)
def test_settings_that_mlx_lm_stumbles_over_are_refused_before_the_work(config, message):
    assert message in str(setting_refusal(config))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 3},
        {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.25, "head_dim": 64},
        {"model_type": "granite", "embedding_multiplier": 12},
    ],
)
def test_settings_that_are_in_order(config):
    assert setting_refusal(config) is None


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_hybrids_have_silu_whatever_is_said(kind):
    config = {"model_type": kind.removesuffix("_text"), "text_config": {"model_type": kind, "hidden_act": "gelu"}}
    assert any("always uses silu" in line for line in behaviour_warnings(config))
