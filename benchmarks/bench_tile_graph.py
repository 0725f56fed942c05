"""Time of the tile kernels alone, without MLX: dependent launches of one CUDA graph.

    python benchmarks/bench_tile_graph.py build OUT      here: needs nvcc, which compiles each text for sm_90a
    python OUT/bench_tile_graph.py run OUT               on the card: needs CuPy and nothing of tqtool

The text is that which MLX would compile (``included_texts``), the geometry that of an H200. Eight matrices of random
words in turn; a graph of 64 launches, 40 replays; per matrix where two are fused.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "17408x5120": {"shape": (17408, 5120)},
    "17408x5120 fused": {"shape": (17408, 5120), "fused": True},
    "17408x5120 int8": {"shape": (17408, 5120), "int8": True},
    "17408x5120 m=2": {"shape": (17408, 5120), "m": 2},
    "17408x5120 m=4": {"shape": (17408, 5120), "m": 4},
    "17408x5120 k=1": {"shape": (17408, 5120), "k": 1},
    "17408x5120 k=2": {"shape": (17408, 5120), "k": 2},
    "17408x5120 k=4": {"shape": (17408, 5120), "k": 4},
    "5120x17408": {"shape": (5120, 17408)},
    "5120x17408 m=2": {"shape": (5120, 17408), "m": 2},
    "5120x17408 m=4": {"shape": (5120, 17408), "m": 4},
    "4096x4096": {"shape": (4096, 4096)},
    "576x1536": {"shape": (576, 1536)},
}
INCLUDES = "".join(f"#include <{name}>\n" for name in ("cuda_fp16.h", "cuda_bf16.h", "cstdint", "cstring"))
MATRICES, LAUNCHES, REPLAYS = 8, 64, 40


def build(folder: Path) -> None:
    """Cubins of all cases, ``cases.json`` and this file, into ``folder``."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tqtool.formats.trellis import spec_for
    from tqtool.kernels.cuda import CUDA, included_texts
    from tqtool.kernels.problem import Problem

    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for name, asked in CASES.items():
        rows, cols = asked["shape"]
        k, m, fused, int8 = asked.get("k", 3), asked.get("m", 1), asked.get("fused", False), asked.get("int8", False)
        spec = spec_for((rows, cols), k=k, axis=1, tile=True)
        op, up = ("swiglu", spec) if fused else ("product", None)
        call = CUDA.call(Problem(op=op, spec=spec, m=m, dtype="bfloat16", up=up, int8=int8))  # type: ignore[arg-type]
        header, body = included_texts(call.source, call.launch.template)
        matrix = "const uint32_t *{0}words, const __half *{0}scales, "
        parameters = "const __nv_bfloat16 *x, " + matrix.format("") + (matrix.format("up_") if fused else "")
        text = f'{INCLUDES}{header}\nextern "C" __global__ void tile({parameters}__nv_bfloat16 *out) {{\n{body}\n}}\n'
        stem = re.sub(r"\W", "_", name)
        source, cubin = folder / f"{stem}.cu", folder / f"{stem}.cubin"
        source.write_text(text)
        target = "arch=compute_90a,code=sm_90a"
        subprocess.run(
            ["nvcc", "-O3", "-std=c++17", "-w", "-gencode", target, "-cubin", "-o", cubin, source], check=True
        )
        blocks, threads = call.launch.grid[0] // call.launch.threadgroup[0], call.launch.threadgroup[0]
        sizes = {"rows": rows, "cols": cols, "k": k, "m": m, "fused": fused, "int8": int8}
        geometry = {"blocks": blocks, "threads": threads, "shared": call.launch.threadgroup_bytes}
        cases.append({"name": name, "cubin": cubin.name, **sizes, **geometry})
        print(name, geometry)
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))
    shutil.copy(__file__, folder)


def run(folder: Path) -> None:
    """One line for each case: median and the middle four fifths, in microseconds."""
    import cupy as cp
    import numpy as np

    rng = np.random.default_rng(0)
    for case in json.loads((folder / "cases.json").read_text()):
        rows, cols, k, m, fused = (case[key] for key in ("rows", "cols", "k", "m", "fused"))
        words = -(-rows // 16) * -(-cols // 16) * 8 * k
        matrices = [cp.asarray(rng.integers(0, 2**32, words, dtype=np.uint32)) for _ in range(MATRICES)]
        scales = [cp.asarray(rng.uniform(0.009, 0.011, rows).astype(np.float16)) for _ in range(MATRICES)]
        x = cp.asarray((rng.standard_normal((m, cols)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
        outputs = [cp.zeros(m * rows, dtype=cp.uint16) for _ in range(MATRICES)]
        kernel = cp.RawModule(path=str(folder / case["cubin"])).get_function("tile")
        kernel.max_dynamic_shared_size_bytes = case["shared"]

        arguments = [
            (x, matrices[i], scales[i], *((matrices[j], scales[j]) if fused else ()), outputs[i])
            for i, j in ((number, (number + 1) % MATRICES) for number in range(MATRICES))
        ]
        geometry = (case["blocks"],), (case["threads"],)

        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            kernel(*geometry, arguments[0], shared_mem=case["shared"])
            stream.synchronize()
            stream.begin_capture()
            for number in range(LAUNCHES):
                kernel(*geometry, arguments[number * (2 if fused else 1) % MATRICES], shared_mem=case["shared"])
            graph = stream.end_capture()
            for _ in range(5):
                graph.launch(stream)
            stream.synchronize()
            times = []
            for _ in range(REPLAYS):
                begin, end = cp.cuda.Event(), cp.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                times.append(cp.cuda.get_elapsed_time(begin, end) * 1e3 / LAUNCHES / (2 if fused else 1))
        low, _, high = np.percentile(times, [10, 50, 90])
        print(f"{case['name']}: {statistics.median(times):.2f} ({low:.2f} … {high:.2f}) µs", flush=True)


def main() -> None:
    verb, folder = sys.argv[1:3] if len(sys.argv) == 3 else ("", "")
    if verb not in ("build", "run"):
        raise SystemExit(__doc__)
    (build if verb == "build" else run)(Path(folder))


if __name__ == "__main__":
    main()
