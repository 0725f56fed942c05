"""Every family by construction: a small random model of the true architecture, folded, judged by both stacks.

transformers' own model in float64 says that the fold changes nothing; transformers and stock mlx-lm on the files that
``convert`` writes say that config and names do not either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.family_parity import exact_error, mean_kl, mlx_logits, rotation_of, transformers_logits
from tests.support.tiny_families import CASES, EXPERTS, random_state, write_family
from tqtool.errors import UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.transform.families import FAMILIES
from tqtool.transform.plan import OnRows, RotateHeads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

EXACT = 1e-10
ROTATED = [name for name, case in CASES.items() if FAMILIES[case.model_type].rotation_refusal is None]
REFUSED = [name for name in CASES if name not in ROTATED]


@pytest.mark.parametrize("name", ROTATED)
def test_folded_is_exact_in_float64(name: str) -> None:
    # transformers' routers take their softmax in float32; tests/property/test_folds.py has experts exact.
    assert exact_error(CASES[name]) < (1e-6 if CASES[name].model_type in EXPERTS else EXACT)


@pytest.mark.parametrize("name", ROTATED)
def test_one_missing_rotation_shows(name: str) -> None:
    plan = rotation_of(CASES[name])
    outputs = tuple(
        replace(output, ops=tuple(op for op in output.ops if not isinstance(op, RotateHeads | OnRows)))
        if output.name.startswith("model.layers.1.self_attn.") and not output.name.endswith("o_proj.weight")
        else output
        for output in plan.outputs
    )
    assert exact_error(CASES[name], plan=replace(plan, outputs=outputs)) > 1e-3


@pytest.mark.parametrize("name", ROTATED)
def test_both_stacks_say_that_the_written_model_is_the_source(tmp_path: Path, name: str) -> None:
    source = write_family(tmp_path / "source", CASES[name])
    for out, seed in (("dense", None), ("rotated", 42)):
        request = ConvertRequest(source=str(source), out=tmp_path / out, rotation_seed=seed, dtype=DType.F32)
        plan_convert(request).run()
    expected, dense = transformers_logits(source), mlx_logits(tmp_path / "dense")
    # Both in float32; sums of at most 320 terms in up to 4 layers of 7 products, heavy-tailed: 3e-6 is usual.
    assert np.abs(dense - expected).max() < 5e-5 * np.abs(expected).max()
    assert 0 < mean_kl(expected, transformers_logits(tmp_path / "rotated")) <= 1e-5
    assert 0 < mean_kl(dense, mlx_logits(tmp_path / "rotated")) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "granite", "phi3"])
def test_gains_after_reload_are_the_planned_ones(tmp_path: Path, name: str) -> None:
    """What a stock loader holds: 1 where a gain was folded, the source's own where it acts inside a head."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    source = write_family(tmp_path / "source", CASES[name])
    request = ConvertRequest(source=str(source), out=tmp_path / "rotated", rotation_seed=42, dtype=DType.F32)
    plan_convert(request).run()
    model, _ = load_model(tmp_path / "rotated", strict=True)
    gains = {path: np.array(value) for path, value in tree_flatten(model.parameters()) if "norm" in path}
    inner = {path for path in gains if path.endswith(("q_norm.weight", "k_norm.weight"))}
    assert bool(inner) is (name == "qwen3")
    assert all((gain == 1).all() for path, gain in gains.items() if path not in inner)
    state = random_state(CASES[name])
    assert gains.keys() == {path for path in state if "norm" in path}
    assert all(np.array_equal(gains[path], state[path]) for path in inner)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_rotated_converts_as_it_is(tmp_path: Path, name: str) -> None:
    source = write_family(tmp_path / "source", CASES[name])
    with pytest.raises(UserError, match="cannot be rotated"):
        plan_convert(ConvertRequest(source=str(source), out=tmp_path / "rotated", rotation_seed=42))
    plan_convert(ConvertRequest(source=str(source), out=tmp_path / "dense", dtype=DType.F32)).run()
    expected, dense = transformers_logits(source), mlx_logits(tmp_path / "dense")
    assert np.abs(dense - expected).max() < 5e-5 * np.abs(expected).max()
