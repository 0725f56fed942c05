"""The kernels read no byte behind a packed matrix: it ends where a page begins that nobody may read."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, mmap
import numpy as np
from tqtool.errors import BackendError
from tqtool.formats.trellis import spec_for
from tqtool.native import trellis_expand, trellis_matvec

page = mmap.PAGESIZE
place = mmap.mmap(-1, 3 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(place))
assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + 2 * page), page, 0) == 0
done = 0
for layout in ({"axis": 0}, {"axis": 1}, {"axis": 1, "tile": True}):
    for k in (1, 2, 3, 4):
        for force in ("avx512", "avx2", "neon", "scalar"):
            spec = spec_for((32, 32), k=k, **layout)
            words = np.frombuffer(place, np.uint32, spec.n_words, 2 * page - 4 * spec.n_words)
            scales, x = np.ones(32, np.float16), np.ones((1, 32), np.float32)
            try:
                trellis_expand(words, scales, spec, force=force)
            except BackendError:
                continue
            trellis_matvec(words, scales, spec, x, force=force)
            done += 1
print(done // 12)
"""


def test_nothing_is_read_behind_the_words() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) >= 1  # instruction sets
