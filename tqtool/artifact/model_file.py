"""The module file that packed artifacts ship, so that stock mlx-lm builds the model without tqtool.

``tqtool/runtime/stock_model.py`` as it stands, and behind it, as text, the kernels with the modules that choose and
launch them: the very files that tqtool's own runtime uses, so there is one of each. They are executed only on a
device whose kernels are in use. Imports of ``tqtool`` become imports of a package of their own, named by its hash.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from importlib import resources

from tqtool.kernels.cuda_kernels import H200, METAL_ON_CUDA, kernels
from tqtool.kernels.metal_kernels import KERNELS, SUM_PARTS_SOURCE
from tqtool.kernels.sources import raw_text

MODEL_FILE = "tqtool_model.py"
MODULES = (
    "errors",
    "mathx.signs",
    "mathx.codes",
    "formats.trellis",
    "kernels",
    "kernels.problem",
    "kernels.rules",
    "kernels.encoding",
    "kernels.metal_kernels",
    "kernels.cuda_kernels",
    "kernels.sources",
    "kernels.backend",
    "kernels.metal",
    "kernels.cuda",
    "kernels.device",
    "runtime.gpu_linear",
    "runtime.gated_mlp",
)
"""Carried modules: each after those that it imports."""
_PACKAGES = ("kernels",)
_IMPORT = re.compile(r"^( *from )tqtool(?=[. ])", re.MULTILINE)
_INCLUDE = re.compile(r'^ *#include "([\w./]+)"', re.MULTILINE)


@lru_cache(maxsize=1)
def model_file() -> bytes:
    """The shipped file; the same bytes for every artifact of this version.

    Raises:
        BackendError: the installation has no kernel sources.
    """
    carried = {name: _module_text(name) for name in MODULES} | kernel_texts()
    digest = hashlib.sha256("\0".join((*carried, *carried.values())).encode()).hexdigest()
    root = f"tqtool_model_{digest[:16]}"
    parts = [
        _module_text("runtime.stock_model"),
        "\n\n# What follows is text: modules and kernels of tqtool, as they stand there (Apache-2.0).\n",
        f'CARRIED_ROOT = "{root}"\n',
    ]
    for name, text in carried.items():
        text = _IMPORT.sub(rf"\1{root}", text)
        parts.append(f'\nCARRIED["{name}"] = r{_quoted(name, text)}\n')
    return "".join(parts).encode()


def kernel_texts() -> dict[str, str]:
    """Texts of the kernels that layers use, by file name, and of all that they include."""
    wanted = [kernel.source for kernel in (*KERNELS, *kernels(H200))] + [SUM_PARTS_SOURCE, METAL_ON_CUDA]
    found: dict[str, str] = {}
    while wanted:
        name = wanted.pop(0)
        if name not in found:
            found[name] = raw_text(name)
            wanted += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def _module_text(name: str) -> str:
    *folders, last = name.split(".")
    inside = [*folders, last, "__init__.py"] if name in _PACKAGES else [*folders, f"{last}.py"]
    return resources.files("tqtool").joinpath(*inside).read_text(encoding="utf-8")


def _quoted(name: str, text: str) -> str:
    """``text`` between quotes of a raw string, which it must not hold itself."""
    quotes = "'''"
    is_safe = quotes not in text and not text.endswith(("\\", "'"))
    assert is_safe, f"{name} cannot be carried as a raw string"
    return f"{quotes}{text}{quotes}"
