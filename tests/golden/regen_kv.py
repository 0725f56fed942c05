"""Write kv.json: what vllm-metal's TurboQuant codec makes of fixed inputs.

    python tests/golden/regen_kv.py path/to/vllm_metal/attention/caches/turboquant.py

The file of record is that of commit 211a1e4bc976cd6c0c961cad8da59d649ea9bd65 of vllm-project/vllm-metal (Apache-2.0),
SHA-256 c45673334568ff7314b058a66bff8657a8d24897df60b07de29010e16c76f0a1, run with MLX 0.32.4 on a CPU (x86-64), float32
inputs. It is not part of this repository. Its tables of levels take about two minutes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import sys
import types
from pathlib import Path

import numpy as np

TARGET = Path(__file__).with_name("kv.json")
SHA256 = "c45673334568ff7314b058a66bff8657a8d24897df60b07de29010e16c76f0a1"
HEAD_DIMS = (64, 128, 256, 512)
KEY_TYPES = {2: "uint2", 4: "uint4", 5: "q5_0", 8: "int8"}
VALUE_BITS = (2, 3, 4, 5, 8)
ROWS = 24


def inputs(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, float32 [ROWS, d], the same on every machine: sums of uniforms, then rows that are special."""
    count = 2 * ROWS * head_dim
    state = np.uint64(head_dim)
    draws = np.empty(4 * count, np.uint32)
    for index in range(draws.size):
        state = np.uint64((int(state) * 6364136223846793005 + 1442695040888963407) % (1 << 64))
        draws[index] = int(state) >> 40
    uniform = draws.reshape(count, 4).astype(np.float64) / (1 << 24) - 0.5
    rows = (uniform.sum(axis=1) * np.sqrt(3.0)).astype(np.float32).reshape(2, ROWS, head_dim)
    keys, values = rows
    keys[1], keys[2], keys[3] = 3.0, 0.0, 1e-5  # constant: an infinite zero, none, a finite one
    keys[4] = keys[4] * np.float32(0.01) + np.float32(5)  # a zero that float16 rounds
    keys[5] *= np.float32(1e-6)  # as small as the epsilon
    keys[6] *= np.float32(1000)
    values[1], values[2] = 0.0, 1.0
    values[5] *= np.float32(1e-7)
    values[6] *= np.float32(300)
    values[7] *= np.float32(1e-12)
    return keys, values


def digest(*arrays: np.ndarray) -> str:
    """SHA-256 of the arrays' bytes; NaN as one NaN, as its sign differs between processors."""
    total = hashlib.sha256()
    for array in arrays:
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def reference(path: Path) -> types.ModuleType:
    """The module in ``path``, without vllm."""
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, "another version of the reference"
    vllm, logger = types.ModuleType("vllm"), types.ModuleType("vllm.logger")
    logger.init_logger = logging.getLogger
    sys.modules |= {"vllm": vllm, "vllm.logger": logger}
    spec = importlib.util.spec_from_file_location("turboquant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    import mlx.core as mx

    module = reference(Path(sys.argv[1]))
    cases = []
    for head_dim, k_bits, v_bits in itertools.product(HEAD_DIMS, KEY_TYPES, VALUE_BITS):
        keys, values = map(mx.array, inputs(head_dim))
        key, value = module.turbo_quant_encode(keys, values, KEY_TYPES[k_bits], v_bits)
        decoded = module.turbo_quant_decode(key, value, key_quant_type=KEY_TYPES[k_bits], value_bits=v_bits)
        stored = [np.array(array) for array in (*key, *value)]
        case = {
            "head_dim": head_dim,
            "k_bits": k_bits,
            "v_bits": v_bits,
            "stored": digest(*stored),
            "decoded": digest(*map(np.array, decoded)),
        }
        if head_dim == 64:
            case["row_0"] = [array[0].tobytes().hex() for array in stored]
        cases.append(case)
    tables = {
        str(bits): [digest(np.array(table, np.float32)) for table in module.lloyd_max_centroids(bits)]
        for bits in VALUE_BITS
    }
    TARGET.write_text(json.dumps({"reference": SHA256, "tables": tables, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
