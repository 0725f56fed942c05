"""Threads that the system refuses, and errors inside them: a call of the kernels ends with a result or an exception."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np
from tqtool import native
from tqtool.formats.trellis import spec_for
from tqtool.mathx import codes

def limit(spare):
    '''No more than ``spare`` bytes of address space from here on: 8 MB stacks and big buffers are refused.'''
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))

spec = spec_for((4096, 512), k=3, axis=1)
words = np.random.default_rng(0).integers(0, 2**32, spec.words_shape, dtype=np.uint32)
scales = np.ones(spec.rows, np.float16)
out = np.zeros((spec.rows, spec.cols), np.float32)
arguments = native._arguments(words, scales, spec)
x, levels = np.zeros((64, 256), np.int16), codes.levels("mul1", 16)
"""

NO_THREADS = """
expected = native.trellis_expand(words, scales, spec, threads=1)
limit(int(sys.argv[1]))
native._native.trellis_expand(*arguments, out, 16, "")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("same" if np.array_equal(out, expected) else "different")
"""

AFTER_A_FORK = """
import os
expected = native.trellis_expand(words, scales, spec, threads=2)
child = os.fork()
if child == 0:
    is_same = np.array_equal(native.trellis_expand(words, scales, spec, threads=2), expected)
    os._exit(not (is_same and len(os.listdir("/proc/self/task")) == 2))
print(os.waitpid(child, 0)[1])
"""

FROM_MANY_THREADS = """
from concurrent.futures import ThreadPoolExecutor
expected = native.trellis_expand(words, scales, spec, threads=1)
with ThreadPoolExecutor(4) as callers:
    found = list(callers.map(lambda n: native.trellis_expand(words, scales, spec, threads=2 + n % 3), range(24)))
print(sum(np.array_equal(each, expected) for each in found))
"""

NO_MEMORY = """
limit(24 << 20)
try:
    native.viterbi_encode(x, levels, window=16, k=1, threads=4)
except MemoryError:
    print("MemoryError")
"""


def answer(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


@pytest.mark.parametrize("spare", [1 << 20, 20 << 20, 1 << 30], ids=["no thread", "one or two", "all"])
def test_fewer_threads_than_wanted(spare: int) -> None:
    """Before: std::terminate, as the threads that had started were still joinable."""
    assert answer(NO_THREADS, str(spare)) == "same"


def test_the_child_of_a_fork_has_threads_of_its_own() -> None:
    """Those of the parent are not there, and nobody would wake or end."""
    assert answer(AFTER_A_FORK) == "0"


def test_calls_from_several_threads_at_once() -> None:
    assert answer(FROM_MANY_THREADS) == "24"


def test_an_exception_in_a_worker_reaches_python() -> None:
    """Each worker of the encoder needs 68 MB at L = 16, k = 1 and may not have them."""
    assert answer(NO_MEMORY) == "MemoryError"
