"""The block UDU factors of a matrix by elimination from the last block up, with explicit inverses. numpy only.

QuIP# (arXiv 2402.04396, §2) with the blocks in the other order: ``H = U·diag(D)·Uᵀ``, U unit block upper triangular.
The last block has ``D = H_kk`` and ``U[:, k] = H[:, k]·D⁻¹``; what is left of the others is their Schur complement, to
which the same is done. No Cholesky factor anywhere.
"""

from __future__ import annotations

import numpy as np


def block_udu(matrix: np.ndarray, width: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """U ``[n, n]`` and the blocks D_k, cut every ``width`` columns from the first on, the last block ragged."""
    left = matrix.astype(np.float64)
    unit, blocks = np.eye(len(matrix)), []
    for start in reversed(range(0, len(matrix), width)):
        block = left[start:, start:]
        above = left[:start, start:] @ np.linalg.inv(block)
        unit[:start, start : start + width] = above
        blocks.insert(0, block)
        left = left[:start, :start] - above @ block @ above.T
    return unit, blocks
