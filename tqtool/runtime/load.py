"""One way to load every artifact and every stock mlx-lm folder: mlx-lm's model, some modules swapped.

mlx is imported inside the functions: the BLAS has to be in place before (see ``tqtool.runtime.blas``).
"""

from __future__ import annotations

import glob
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tqtool.errors import ArtifactError, SourceError, TqError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.formats.trellis import TrellisSpec, specs_from_config
from tqtool.runtime.blas import BlasReport, ensure_blas
from tqtool.source.checkpoint import TensorRef, open_checkpoint
from tqtool.source.config import declared_quantization, read_config, rope_updates
from tqtool.source.hub import is_hub_id, resolve_snapshot
from tqtool.source.mlx_lm import behaviour_warnings, refuse_unservable
from tqtool.source.mlx_lm_settings import stated_defaults

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Compute = Literal["packed", "expand"]
Activations = Literal["float", "int8"]
DtypeName = Literal["float32", "bfloat16", "float16"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What ``load`` did.

    Attributes:
        path: The folder that was read.
        compute: How quantized layers run.
        dtype: Type of the dense parameters in memory; None where each kept its own.
        n_trellis: Trellis layers in the artifact.
        n_fused: MLPs whose gate and up are one launch for few rows.
        n_joined: Attentions whose queries, keys and values are.
        activations: What trellis kernels read of their inputs.
        n_expanded: Quantized layers, trellis or affine, that were turned into dense ones.
        kept_packed: Quantized layers that ``compute="expand"`` had to leave as they are.
        file_bytes: Size of the weight files.
        blas: What serves dense products.
    """

    path: Path
    compute: Compute
    dtype: str | None
    n_trellis: int
    n_fused: int
    n_joined: int
    activations: Activations
    n_expanded: int
    kept_packed: tuple[str, ...]
    file_bytes: int
    blas: BlasReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: mlx-lm's module tree, its tokenizer, the config as read."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    report: LoadReport


def load(
    path: str | Path,
    *,
    compute: Compute = "packed",
    dtype: DtypeName | None = None,
    activations: Activations = "float",
) -> LoadedModel:
    """Load any artifact (float, affine, mx/nv, fake-quant, carrier, packed trellis) or stock mlx-lm folder.

    Args:
        path: Folder, or a hub id.
        compute: ``packed`` keeps quantized layers packed. ``expand`` turns each into a dense layer once,
            which is what scoring on a CPU wants; it costs the memory of a dense model.
        dtype: Type of the dense parameters. By default float32 on a CPU (bf16 products do not go through
            BLAS) and the stored types on a GPU.
        activations: ``int8`` rounds the inputs of trellis layers to 8 bits where kernels take them so: faster, and
            with an error (docs/benchmarks.md). Only on CUDA.

    Raises:
        UserError: ``int8`` where no kernel takes it; no model there, unknown architecture, a custom-code model, config
            and weights that do not fit.
        ArtifactError: damaged weight files, a damaged artifact, unknown trellis format version.
    """
    _check_choice("compute", compute, get_args(Compute))
    _check_choice("activations", activations, get_args(Activations))
    if dtype is not None:
        _check_choice("dtype", dtype, get_args(DtypeName))
    blas = ensure_blas()
    folder = model_folder(path)
    config = loading_config(folder)
    tensors = _read_headers(folder)
    specs = specs_from_config(config)
    _check_trellis(specs, tensors)

    import mlx.core as mx

    model = build_model(folder, config, activations)
    on_cpu = mx.default_device().type == mx.cpu
    dense_type = getattr(mx, dtype) if dtype else (mx.float32 if on_cpu else None)
    if dense_type is not None:
        _cast(model, dense_type, skip=specs)
    n_fused, n_joined, n_expanded, kept = 0, 0, 0, tuple[str, ...]()
    if compute == "expand":
        from tqtool.runtime.expand import expand_layers

        n_expanded, kept = expand_layers(model, dense_type or _float_type(model))
        if kept:
            log.warning("%d quantized layers of unknown class stay packed, first %s", len(kept), kept[0])
    elif on_cpu:
        from tqtool.runtime.affine import swap_prompt_layers

        swap_prompt_layers(model)
    else:
        from tqtool.runtime.gated_mlp import fuse_gates
        from tqtool.runtime.joint_products import join_projections

        n_fused, n_joined = fuse_gates(model), join_projections(model)
    mx.eval(model.parameters())
    report = LoadReport(
        path=folder,
        compute=compute,
        dtype=None if dense_type is None else str(dense_type).removeprefix("mlx.core."),
        n_trellis=len(specs),
        n_fused=n_fused,
        n_joined=n_joined,
        activations=activations,
        n_expanded=n_expanded,
        kept_packed=kept,
        file_bytes=sum(file.stat().st_size for file in folder.glob("model*.safetensors")),
        blas=blas,
    )
    return LoadedModel(model=model, tokenizer=load_tokenizer(folder), config=config, report=report)


def scoring_compute() -> Compute:
    """The fastest way to run whole windows here: dense on a CPU, packed on a GPU."""
    ensure_blas()
    import mlx.core as mx

    return "expand" if mx.default_device().type == mx.cpu else "packed"


def model_folder(path: str | Path) -> Path:
    """The folder of a model: ``path`` itself, or the snapshot of a hub id; UserError if it is neither."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if not folder.exists() and is_hub_id(str(path)):
        return resolve_snapshot(str(path), revision=None)[0]
    found = "no such folder" if not folder.exists() else "a file" if folder.is_file() else "no config.json in it"
    hint = "give a folder with config.json, model*.safetensors and a tokenizer, or a hub id"
    if folder.suffix.lower() == ".gguf":
        hint = f"tqtool import-gguf {folder} OUT makes a model folder of it"
    raise UserError(f"{path}: expected a model folder, found {found}", hint=hint)


def load_tokenizer(folder: Path) -> TokenizerWrapper:
    """mlx-lm's tokenizer of a model folder; stops at the union of the end tokens that config files name."""
    ensure_blas()  # mlx-lm imports mlx
    from mlx_lm.utils import load_config
    from mlx_lm.utils import load_tokenizer as stock_load_tokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder}: no tokenizer files", hint="copy tokenizer.json and its config there")
    is_artifact = (folder / MANIFEST_NAME).exists()
    with _reading(folder, "its tokenizer cannot be loaded", is_artifact=is_artifact):
        return stock_load_tokenizer(folder, eos_token_ids=load_config(folder).get("eos_token_id"))


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name}={value!r}: expected one of {', '.join(known)}")


@contextmanager
def _reading(folder: Path, what: str, *, is_artifact: bool) -> Iterator[None]:
    """Whatever is raised about a folder's content becomes one line of ours.

    An artifact of tqtool that does not load is damaged (ArtifactError); any other folder may just be of a kind that
    cannot be used (SourceError).
    """
    kind, look = (ArtifactError, "verify") if is_artifact else (SourceError, "inspect")
    try:
        yield
    except SourceError as error:
        raise kind(error.message, hint=error.hint) from error
    except (TqError, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
        reason = " ".join((f"{type(error).__name__}:", *lines))
        raise kind(f"{folder}: {what} ({reason})", hint=f"`tqtool {look}` says what is known of it") from error


def loading_config(folder: Path) -> dict[str, Any]:
    """The config that the model of ``folder`` is built from; SourceError or ArtifactError where it cannot serve."""
    from mlx_lm.utils import load_config

    is_artifact = (folder / MANIFEST_NAME).exists()
    with _reading(folder, "its config files cannot be read", is_artifact=is_artifact):
        read_config(folder)  # its own words for what is missing or malformed
        config = dict(load_config(folder))
    # transformers 5 keeps the rotary settings where mlx-lm does not look; the source reader repeats them, so must we.
    config |= rope_updates(config)
    config |= stated_defaults(config)
    if "trellis" not in config:
        refuse_unservable(folder, config)
    for warning in behaviour_warnings(config):
        log.warning("%s: %s", folder, warning)
    return config


def _read_headers(folder: Path) -> dict[str, TensorRef]:
    """All tensors of the weight files: headers, shards and index checked as for a source."""
    is_artifact = (folder / MANIFEST_NAME).exists()
    with _reading(folder, "its weight files cannot be read", is_artifact=is_artifact):
        tensors = dict(open_checkpoint(str(folder), allow_quantized=True).tensors)
    wide = next((name for name, tensor in tensors.items() if tensor.dtype is DType.F64), None)
    if wide is not None:
        raise SourceError(
            f"{folder}: tensor {wide!r} is F64, which MLX does not read",
            hint=f"tqtool convert {folder} OUT --dtype f32 writes the same model in float32; use OUT",
        )
    return tensors


def _check_trellis(specs: dict[str, TrellisSpec], tensors: dict[str, TensorRef]) -> None:
    for module, spec in specs.items():
        expected = {"weight": (DType.U32, spec.words_shape), "scales": (DType.F16, spec.scales_shape)}
        for name, (dtype, shape) in expected.items():
            found = tensors.get(f"{module}.{name}")
            if found is None or (found.dtype, found.shape) != (dtype, shape):
                what = f"{found.dtype} {list(found.shape)}" if found else "nothing"
                raise ArtifactError(
                    f"{module}.{name}: config.json promises {dtype} {list(shape)}, the file holds {what}",
                    hint="the artifact is incomplete or was edited; write it again",
                )


def build_model(
    folder: Path, config: dict[str, Any], activations: Activations = "float", *, strict: bool = True
) -> nn.Module:
    """mlx-lm's model of ``folder`` with lazily loaded weights; ``strict`` is off for whoever fills them in himself.

    Raises:
        UserError: int8 activations where no kernel takes them.
        SourceError: mlx-lm cannot build it; ArtifactError where the folder is an artifact of tqtool.
    """
    from mlx_lm.utils import load_model

    choose = {} if "trellis" not in config else {"get_model_classes": _trellis_classes(activations)}
    is_artifact = "trellis" in config or (folder / MANIFEST_NAME).exists()
    foreign = None if "quantization" in config or "trellis" in config else declared_quantization(config)
    what = "mlx-lm cannot build the model of this config and these weights"
    if foreign is not None:
        what = f"already quantized, {foreign}, in a way that mlx-lm does not load"
    with _reading(folder, what, is_artifact=is_artifact), _plain_path(folder) as path:
        # Our own classes serve trellis artifacts: the module file inside the artifact is never executed.
        model, _ = load_model(path, lazy=True, strict=strict, model_config={**config, "model_file": None}, **choose)
    return model


@contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """``folder``, or a link to it where its path holds ``[``, ``*`` or ``?``, which mlx-lm takes for a pattern."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "model"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


def _trellis_classes(activations: Activations) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    import mlx.core as mx

    from tqtool.runtime.linear import experts_class_for, layer_class_for
    from tqtool.runtime.stock_model import Model, ModelArgs

    device, int8 = mx.default_device(), activations == "int8"
    build = partial(
        Model, layer_class=layer_class_for(device, int8=int8), experts_class=experts_class_for(device, int8=int8)
    )
    return lambda config: (build, ModelArgs)


def _cast(model: nn.Module, dtype: mx.Dtype, *, skip: dict[str, TrellisSpec]) -> None:
    """Cast every floating parameter except those of trellis layers, whose float16 scales are the format's."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    def wanted(path: str, value: mx.array) -> bool:
        return mx.issubdtype(value.dtype, mx.floating) and path.rpartition(".")[0] not in skip

    parameters = tree_flatten(model.parameters())
    cast = [(path, value.astype(dtype)) for path, value in parameters if wanted(path, value)]
    model.update(tree_unflatten(cast))


def _float_type(model: nn.Module) -> mx.Dtype:
    """The type most floating parameters have: what a dense twin of a packed layer should be."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    types = [value.dtype for _, value in tree_flatten(model.parameters())]
    floating = Counter[mx.Dtype](dtype for dtype in types if mx.issubdtype(dtype, mx.floating))
    return floating.most_common(1)[0][0]
