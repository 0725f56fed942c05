"""Where the real models are that the tests marked ``model`` run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MODELS = Path(os.environ.get("TQTOOL_TEST_MODELS", Path(__file__).parents[2] / "build" / "models"))


def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, made by ``import-gguf``.

    Where it is missing the test skips, or fails under TQ_REQUIRE_MODEL=1.
    """
    folder = MODELS / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        if os.environ.get("TQ_REQUIRE_MODEL") == "1":
            pytest.fail(f"no model at {folder}, and TQ_REQUIRE_MODEL=1: run make model")
        pytest.skip(f"no model at {folder}: run make model, or set TQTOOL_TEST_MODELS")
    return folder
