"""Read by every Python that a test starts: there torch cannot be found, as with users.

It is installed for peers inside the test process. transformers imports it where it finds it, and mlx-lm imports
transformers: more than a second of every process that loads a model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class WithoutTorch(PathFinder):
    """Looks everywhere for everything else."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
