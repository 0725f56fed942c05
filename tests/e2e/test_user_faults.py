"""Faults that users met in other tools and no other test here covers, and that their page names tests that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_hybrid
from tests.support.conversions import convert, plan
from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_families import CASES, write_family
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.errors import SourceError, UserError
from tqtool.pipeline.rules import Packed
from tqtool.runtime.load import load_tokenizer
from tqtool.transform.plan import plan_identity

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
MESSAGES = [{"role": "user", "content": "a cat"}]
ASKED = (2, 4, 5, 8, 9, 14, 15, 16, 17, 22, 24, 26, 27, 28, 29, 32, 35, 36, 40, 41, 42)


@pytest.mark.parametrize("place", ["config", "jinja", "both"])
def test_a_chat_template_survives_wherever_it_is_written(tmp_path: Path, place: str) -> None:
    """I14: a template that lies only in chat_template.jinja, as newer repositories have it, or only in the config."""
    source = write_tiny(tmp_path / "source", tokenizer=False)
    write_bpe(source, template=None if place == "jinja" else TEMPLATE)
    if place != "config":
        (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, tmp_path / "out")
    loaded = load_tokenizer(tmp_path / "out")
    text = loaded.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == "<user>a cat<answer>"
    assert (tmp_path / "out" / "chat_template.jinja").exists() is (place != "config")


def test_added_tokens_survive(tmp_path: Path) -> None:
    """I22: 15 of 18 conversions had lost all of theirs to a tokenizer that was written anew."""
    from tokenizers import AddedToken, Tokenizer

    source = write_tiny(tmp_path / "source", tokenizer=False)
    write_bpe(source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    added = [AddedToken(f"<loc_{index}>", special=index % 2 == 0) for index in range(40)]
    assert tokenizer.add_tokens(added) == 40
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    convert(source, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    loaded = load_tokenizer(tmp_path / "out")
    assert loaded.encode("<loc_7><loc_39>", add_special_tokens=False) == [
        loaded.convert_tokens_to_ids("<loc_7>"),
        loaded.convert_tokens_to_ids("<loc_39>"),
    ]


@pytest.mark.parametrize("name", ["llama", "granite", "phi3", "gemma3_text"])
@pytest.mark.parametrize("bits", [8, 6])
def test_no_module_gets_fewer_bits_than_were_asked_for(tmp_path: Path, name: str, bits: int) -> None:
    """I36: "quantize to 8 bits" that gave the output tensor fewer."""
    source = write_family(tmp_path / "source", CASES[name])
    job = plan(source, tmp_path / "out", packing=Packed(bits=bits, group_size=64, mode="affine"))
    quantizers = {row.module: row.quantizer for row in job.plan.rows if row.module}
    assert set(quantizers.values()) == {f"affine{bits} g64"}


def test_the_towers_of_a_multimodal_model_are_neither_dropped_nor_announced(tmp_path: Path) -> None:
    """I28: a config that announces a tower whose weights are not there; here neither goes without the other."""
    tiny = Tiny()
    shapes = {name: array.shape for name, array in tiny.tensors().items()}
    tower = {"vision_tower.patch_embed.weight": (8, 8), "multi_modal_projector.linear.weight": (8, 8)}
    with pytest.raises(SourceError, match=r"no rule claims: vision_tower\.patch_embed\.weight, multi_modal_projector"):
        plan_identity(shapes | tower, tiny.config())
    for model_type in ("gemma3", "llava", "mistral3", "qwen2_vl"):
        with pytest.raises(UserError, match=f"model_type '{model_type}' is not known"):
            plan_identity(shapes, {**tiny.config(), "model_type": model_type, "vision_config": {"hidden_size": 8}})


def test_a_tower_is_announced_exactly_where_it_is_held(tmp_path: Path) -> None:
    """I28, of the one family with a tower that is known: its tensors without vision_config, and the other way round."""
    source = tiny_hybrid.write_hybrid(tmp_path / "source")
    tensors = tiny_hybrid.tensors_of(source)
    tiny_hybrid.change(source, {name: tensor for name, tensor in tensors.items() if ".visual." not in name})
    job = plan(source, tmp_path / "out")
    keys = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    said = f"left out of config.json: {', '.join(keys)} (the checkpoint holds no vision tower)"
    assert sorted(note for note in job.plan.notes if "vision" in note) == [said]
    job.run()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [key for key in written if key.startswith(("vision", "image", "video"))] == []
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for vision in ({}, {"vision_config": None}):
        with pytest.raises(SourceError, match=r"vision_config: expected an object, as the checkpoint holds 21 tensors"):
            plan_identity(shapes, {key: value for key, value in written.items() if key != "quantization"} | vision)


# ------------------------------------------------------------------------------------------------------------- page
def rows() -> dict[int, str]:
    """Fault number → what the page says."""
    text = (ROOT / "docs" / "user-faults.md").read_text()
    found = re.findall(r"^\| I(\d+) \|(.*)\|$", text, re.MULTILINE)
    assert len(found) == len(dict(found))
    return {int(number): said for number, said in found}


def test_every_fault_has_a_row_with_a_test_or_a_reason() -> None:
    said = rows()
    assert sorted(said) == sorted(ASKED)
    for number, text in said.items():
        assert "tests/" in text or "Cannot happen:" in text, number


def test_the_tests_that_the_page_names_exist() -> None:
    named: list[Any] = [name for text in rows().values() for name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)]
    assert len(named) > 30
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    assert json.dumps(named)
