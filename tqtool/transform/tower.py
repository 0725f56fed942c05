"""The vision tower of a hybrid: which tensors it has, and of which shape.

Source of names and wiring: transformers' ``Qwen3_5VisionModel``; mlx-vlm has the same names and the patch
convolution's channels last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tqtool.errors import SourceError
from tqtool.transform.families import Slot
from tqtool.transform.folds import Op, Permute
from tqtool.transform.layout import Parameter, read_size, require_complete
from tqtool.transform.nested import TOWER

VISION_KEY = "vision_config"
VISION_KEYS = (
    *(VISION_KEY, "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)
"""Of config.json, which announce a tower."""
_SIDECAR_KEY = "optiq_vision"
IN_CHANNELS = 3
"""Of an image, where vision_config does not say."""
_PATCHES = "patch_embed.proj.weight"
_SEAM = "merger.linear_fc2"
"""What a vision tower writes into the residual stream."""


def read_tower(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], hidden: int
) -> tuple[Parameter, ...]:
    """Claim every tensor of a vision tower, as mlx-vlm stores it.

    Args:
        names: Name in the artifact → name in the source; none without a tower.
        shapes: Shape of every source tensor.
        config: Parsed config.json of the whole model.
        hidden: Width of the residual stream, into which the tower writes.

    Raises:
        SourceError: ``vision_config`` or a size in it is missing, or a tensor is missing, left over or of an unexpected
            shape.
    """
    if not names:
        return ()
    vision = _vision_config(names, config)
    width = read_size(vision, "out_hidden_size", part=VISION_KEY)
    if width != hidden:
        raise SourceError(
            f"config.json: {VISION_KEY}.out_hidden_size {width}: expected {hidden}, the text model's hidden_size",
            hint="the vision tower and the text model belong to different models",
        )
    depth = read_size(vision, "depth", part=VISION_KEY)
    if depth > len(names):  # before listing their tensors: the number may be absurd
        raise SourceError(
            f"config.json: {VISION_KEY}.depth {depth}: the checkpoint holds {len(names)} tensors of a vision tower, "
            "fewer than one a block",
            hint="config.json and the weights belong to different models",
        )
    first, source = next(iter(names.items()))
    stem = source.removesuffix(first.removeprefix(TOWER))
    parameters = tuple(
        _parameter(part, shape, names.get(TOWER + part, stem + part), shapes) for part, shape in tower_tensors(vision)
    )
    found = {source: shapes[source] for source in names.values()}
    require_complete(f"a model with the vision tower of its {VISION_KEY}", found, parameters, ())
    return parameters


def tower_tensors(vision: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name, without a prefix, and shape of every tensor; the patch convolution's is ``[out, in, t, h, w]``.

    Args:
        vision: ``vision_config`` of config.json.

    Raises:
        SourceError: A size is missing or no positive integer.
    """
    width, inner, patch, frames, merge, positions, n_out, depth = (
        read_size(vision, key, part=VISION_KEY)
        for key in (
            *("hidden_size", "intermediate_size", "patch_size", "temporal_patch_size", "spatial_merge_size"),
            *("num_position_embeddings", "out_hidden_size", "depth"),
        )
    )
    channels = read_size(vision, "in_channels", default=IN_CHANNELS, part=VISION_KEY)
    merged = width * merge**2  # a square of patches becomes one token
    yield _PATCHES, (width, channels, frames, patch, patch)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (positions, width)
    for block in range(depth):
        stem = f"blocks.{block}"
        yield from _norm(f"{stem}.norm1", width)
        yield from _norm(f"{stem}.norm2", width)
        yield from _linear(f"{stem}.attn.qkv", 3 * width, width)
        yield from _linear(f"{stem}.attn.proj", width, width)
        yield from _linear(f"{stem}.mlp.linear_fc1", inner, width)
        yield from _linear(f"{stem}.mlp.linear_fc2", width, inner)
    yield from _norm("merger.norm", width)
    yield from _linear("merger.linear_fc1", merged, merged)
    yield from _linear(_SEAM, n_out, merged)


def outdated_keys(names: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, None]:
    """Keys of config.json that announce what is not there; None takes a key out.

    Without a tower, those that tell of one; in any case the one of a file beside the source's shards, which is stated
    anew where such a file is written.
    """
    outdated = (_SIDECAR_KEY,) if names else (*VISION_KEYS, _SIDECAR_KEY)
    return {key: None for key in outdated if key in config}


def _vision_config(names: Mapping[str, str], config: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config.get(VISION_KEY)
    if isinstance(vision, Mapping):
        return vision
    raise SourceError(
        f"config.json: {VISION_KEY}: expected an object, as the checkpoint holds {len(names)} tensors of a vision "
        f"tower ({next(iter(names.values()))}, …), found {vision!r}",
        hint="take the config.json that belongs to these weights, or leave the tower's tensors out too",
    )


def _parameter(part: str, shape: tuple[int, ...], source: str, shapes: Mapping[str, tuple[int, ...]]) -> Parameter:
    stored: tuple[Op, ...] = ()
    if part == _PATCHES:
        n_out, channels, *kernel = shape
        shape = (n_out, *kernel, channels)
        # Hugging Face has the channels second; what is neither is held against its shape.
        stored = () if shapes.get(source) == shape else (Permute(axes=(0, 2, 3, 4, 1)),)
    return Parameter(
        name=TOWER + part,
        shape=shape,
        stored=stored,
        slot=Slot.TOWER_OUT if part.rpartition(".")[0] == _SEAM else Slot.TOWER,
        is_bias=part.endswith(".bias"),
        source=source,
    )


def _linear(stem: str, n_out: int, n_in: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{stem}.weight", (n_out, n_in)
    yield f"{stem}.bias", (n_out,)


def _norm(stem: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{stem}.weight", (width,)
    yield f"{stem}.bias", (width,)
