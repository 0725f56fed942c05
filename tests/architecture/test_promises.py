"""Promises about the package as a whole: start-up, sizes, independence of the oracles, generated files."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "tqtool").rglob("*.py"))


def test_help_imports_nothing_heavy() -> None:
    """`tqtool --help` must feel instant; what makes it slow is an import, so imports are what is tested, not time."""
    heavy = [
        "mlx",
        "mlx_lm",
        "numpy",
        "scipy",
        "transformers",
        "torch",
        "gguf",
        "huggingface_hub",
        "pydantic",
        "matplotlib",
        "starlette",
        "uvicorn",
        "prometheus_client",
    ]
    code = (
        "import sys; sys.argv = ['tqtool', '--help']\n"
        "from tqtool.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-E", "-c", code]  # -E: torch can be found
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "trellis" in done.stdout
    assert done.stderr.strip() == "[]"


def test_modules_can_be_read_in_one_sitting() -> None:
    others = [path for folder in ("tests", "benchmarks", "docs", "kernels") for path in (ROOT / folder).rglob("*.py")]
    paths = [*SOURCES, *sorted(others)]
    long = {str(path.relative_to(ROOT)): n for path in paths if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_oracles_are_independent() -> None:
    for path in (ROOT / "tests" / "oracles").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("tqtool", "mlx", "mlx_lm") for name in names), path.name


def test_the_manifest_names_every_package_that_computes() -> None:
    from tqtool.pipeline.provenance import tool_versions

    computing = [path for path in SOURCES if path.parent.name in ("mathx", "solve", "transform", "pipeline")]
    found = set()
    for path in computing:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.split(".")[0] for name in names}
    assert found - sys.stdlib_module_names <= {name.replace("-", "_") for name in tool_versions()}


@pytest.mark.parametrize(
    "script", ["kernels/generate_constants.py", "docs/generate_cli.py", "docs/generate_recipes.py"]
)
def test_generated_files_are_fresh(script: str) -> None:
    done = subprocess.run([sys.executable, ROOT / script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_error_has_its_documented_exit_code() -> None:
    from tqtool import errors

    codes = {name: kind.exit_code for name, kind in vars(errors).items() if isinstance(kind, type)}
    expected = {
        "UserError": 2,
        "SourceError": 2,
        "NumericalError": 3,
        "ArtifactError": 4,
        "BackendError": 5,
        "TqError": 1,
    }
    assert {name: code for name, code in codes.items() if name in expected} == expected


def test_the_public_names_are_these() -> None:
    import tqtool

    assert sorted(tqtool.__all__) == ["LoadedModel", "__version__", "load"]
    assert all(getattr(tqtool, name) for name in tqtool.__all__)


def test_the_changelog_knows_the_version() -> None:
    import tomllib

    import tqtool

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tqtool.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_blas_threads_sleep_before_numpy_is_there() -> None:
    """The setting is read when the library is loaded; the user's own wins."""
    code = (
        "import os, sys\n"
        "import tqtool.cli.app\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.argv = ['tqtool', '--version']\n"
        "try: tqtool.cli.app.main()\nexcept SystemExit: pass\n"
        "print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_THREAD_TIMEOUT"}
    for extra, expected in (({}, "4"), ({"OPENBLAS_THREAD_TIMEOUT": "26"}, "26")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment | extra)
        assert done.stdout.splitlines()[-1] == expected
