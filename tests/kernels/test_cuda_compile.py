"""Every CUDA kernel compiles for the cards of three generations: the text that MLX would compile, by NVRTC."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace

import pytest

from tests.support import nvrtc
from tests.support.trellis_cases import TABLE
from tqtool.kernels.cuda import cuda_backend
from tqtool.kernels.cuda_encoder import CUDA_ENCODER
from tqtool.kernels.cuda_kernels import A100, H200, kernels
from tqtool.kernels.encoding import encode_problem
from tqtool.kernels.metal import sum_parts
from tqtool.kernels.problem import choose
from tqtool.mathx import codes

CARDS = {"sm_80": A100, "sm_90": H200, "sm_100": H200}
HAS_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64"
"""Where the wheels exist they are installed for development: a missing one is a failure and no skip."""
FIXED = {"words": "uint32", "up_words": "uint32", "scales": "float16", "up_scales": "float16", "dims": "uint32"}


def cases():
    """A case for each kernel and bits: the dtypes, codes and windows of the table go through them in turn."""
    found = {}
    for case in TABLE:
        kernel = choose(case.problem, kernels(H200)).kernel
        if kernel is not None:
            found.setdefault((kernel.source, case.problem.spec.k), case)
    return sorted(found.items())


def variants(call, case, card):
    """The call; from k=3 on, of a kernel of the tensor cores, also on two processors and with int8 activations."""
    if not call.source.startswith("cuda/") or case.problem.spec.k < 3:
        return [call]
    few = cuda_backend(replace(card, processors=2)).call(case.problem)
    return [call, few, cuda_backend(card).call(replace(case.problem, int8=True))]


@pytest.mark.skipif(not HAS_WHEELS, reason="NVIDIA has no compiler for this machine")
@pytest.mark.parametrize("architecture", CARDS)
def test_every_kernel_compiles(architecture):
    """One kernel of each source and k, split over the architectures; each source on each of them at least once."""
    number = list(CARDS).index(architecture)
    for (source, k), case in cases():
        if k % 3 != number and k != number + 1:
            continue
        call = cuda_backend(CARDS[architecture]).call(case.problem)
        assert call.source == source
        for each in variants(call, case, CARDS[architecture]):
            text = nvrtc.text(each, [FIXED.get(name, case.problem.dtype) for name in call.inputs])
            assert len(nvrtc.compile_text(text, architecture)) > 1000, case


@pytest.mark.skipif(not HAS_WHEELS, reason="NVIDIA has no compiler for this machine")
@pytest.mark.parametrize(
    ("architecture", "window", "k"),
    [("sm_80", 12, 1), ("sm_90", 12, 3), ("sm_100", 14, 4), ("sm_90", 14, 3), ("sm_90", 16, 3), ("sm_100", 16, 2)],
)
def test_the_encoder_compiles(architecture, window, k):
    call = CUDA_ENCODER.call(encode_problem(1000, codes.levels("mul1", window), window=window, k=k))
    assert len(nvrtc.compile_text(nvrtc.text(call, ["int16", "int16", "uint32"]), architecture)) > 1000


@pytest.mark.skipif(not HAS_WHEELS, reason="NVIDIA has no compiler for this machine")
def test_a_wrong_text_does_not_compile():
    call = sum_parts((2, 1, 8), "float16")
    text = nvrtc.text(call, ["float32", "uint32"])
    assert nvrtc.compile_text(text, "sm_90")
    with pytest.raises(AssertionError, match=r'identifier "splits_" is undefined'):
        nvrtc.compile_text(text.replace("s < splits", "s < splits_"), "sm_90")
