"""tqtool: quantize language models offline, prove what was written, run the result.

``load`` runs an artifact; everything else is reached through its own module or the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqtool.runtime.load import LoadedModel, load

__all__ = ["LoadedModel", "__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the runtime on first use: it brings MLX, and ``tqtool --help`` must not."""
    if name in ("LoadedModel", "load"):
        from tqtool.runtime import load as runtime_load

        return getattr(runtime_load, name)
    raise AttributeError(f"module 'tqtool' has no attribute {name!r}")
