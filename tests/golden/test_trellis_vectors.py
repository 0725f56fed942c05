"""docs/formats/trellis.md is enough to write a decoder: this one is written from it and uses nothing of tqtool."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs" / "formats"
CASES = json.loads((DOCS / "trellis-vectors.json").read_text())


def decode(case: dict) -> np.ndarray:
    # --- the decoder of a stranger, from docs/formats/trellis.md -------------------------------------------------
    s, k, T = case["spec"], case["spec"]["k"], case["spec"]["block"]
    n, out = T * k // 32, np.empty((s["rows"], s["cols"]), np.float32)
    f32, scales = np.float32, np.array(case["scales"], np.uint16).view(np.float16)
    for r in range(s["rows"]):
        for c in range(s["cols"]):
            if s["tile"]:
                b, t = r // 16 * (s["stride"] // 16) + c // 16, r % 16 * 16 + c % 16
            else:
                b, t = divmod(r * s["stride"] + c, T)
            w, shift = divmod((T - 1 - t) * k, 32)
            word = case["words"][b * n : (b + 1) * n]
            state = ((word[(w + 1) % n] << 32 | word[w]) >> shift) & ((1 << s["window"]) - 1)
            if s["code"] == "3inst":
                h = ((state * 89226354 + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
                pair = np.array([h >> 16, h & 0xFFFF], np.uint16).view(np.float16).astype(f32)
                value = (pair[0] + pair[1]) * f32(1 / 1.24371088)
            else:
                a, d, unit = (0x83DCD12D, 0, 147.7) if s["code"] == "mul1" else (34038481, 76625530, 147.800537109375)
                x = (state * a + d) & 0xFFFFFFFF
                value = f32((x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24) - 510) * f32(1 / unit)
            out[r, c] = value * f32(scales[r])
    return out
    # ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "k{k} {code} axis{axis} L{window} tile{tile}".format(**case["spec"])
)
def test_a_decoder_written_from_the_page_agrees_to_the_bit(case: dict) -> None:
    expected = np.array(case["values"], np.uint32).reshape(case["spec"]["rows"], case["spec"]["cols"])
    assert np.array_equal(decode(case).view(np.uint32), expected)


@pytest.mark.parametrize("force", ["", "scalar"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "k{k} {code} axis{axis} L{window} tile{tile}".format(**case["spec"])
)
def test_our_decoder_agrees_to_the_bit(case: dict, force: str) -> None:
    from tqtool.formats.trellis import TrellisSpec
    from tqtool.native import trellis_expand

    spec = TrellisSpec.from_config("case", case["spec"])
    words = np.array(case["words"], np.uint32).reshape(spec.words_shape)
    scales = np.array(case["scales"], np.uint16).view(np.float16)
    expected = np.array(case["values"], np.uint32).reshape(spec.rows, spec.cols)
    assert np.array_equal(trellis_expand(words, scales, spec, force=force).view(np.uint32), expected)


def test_the_worked_example_of_the_page_is_true() -> None:
    page = (DOCS / "trellis.md").read_text()
    case = CASES[2]
    values = np.array(case["values"], np.uint32).view(np.float32)
    words = [f"{word:08x}" for word in case["words"][:24]]
    assert f"{words[0]} {words[1]} … {words[21]} {words[22]} {words[23]}" in page
    for i in (0, 1, 254, 255):
        row = next(line for line in page.splitlines() if line.startswith(f"| {i} |"))
        assert float(row.split("|")[-2].strip().replace("−", "-")) == pytest.approx(float(values[i]), abs=1e-7)


def test_the_worked_tile_of_the_page_is_true() -> None:
    page = (DOCS / "trellis.md").read_text()
    case, (r, c) = CASES[6], (17, 21)
    words = case["words"][4 * 24 : 5 * 24]
    assert f"are `{words[21]:08x} {words[22]:08x}`" in page
    assert f"row 17 is {float(np.array(case['scales'], np.uint16).view(np.float16)[r])}" in page
    cells = [cell.strip() for cell in next(x for x in page.splitlines() if x.startswith("| 17, 21 |")).split(" | ")]
    weight = float(np.array(case["values"], np.uint32).view(np.float32)[r * case["spec"]["cols"] + c])
    assert float(cells[-1].strip(" |").replace("−", "-")) == pytest.approx(weight, abs=1e-7)
    assert cells[1:5] == ["4", "21", "702", "21, 30"]


def test_the_stored_paths_are_coded_again_without_loss() -> None:
    """Decoded values are coded without loss."""
    from tqtool.formats.trellis import TrellisSpec, unpack
    from tqtool.mathx import codes
    from tqtool.native import viterbi_encode

    for case in CASES:
        spec = TrellisSpec.from_config("case", case["spec"])
        words = np.array(case["words"], np.uint32).reshape(spec.n_blocks, -1)
        states = unpack(words, spec.k, spec.window)
        levels = codes.levels(spec.code, spec.window)
        again, _ = viterbi_encode(levels[states], levels, window=spec.window, k=spec.k)
        assert np.array_equal(levels[again], levels[states])
