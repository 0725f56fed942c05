"""The multi-token-prediction companion of an artifact: found, folded as its trunk is, written to its folder ``mtp/``.

It is an artifact of its own inside the trunk's, with config, index and manifest, in the layout of mlx-vlm's
``qwen3_5_mtp``: dense, or packed affine at 8 or 4 bits. It shares the trunk's residual stream, so both carry the same
rotations, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqtool.errors import SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.manifest import rotation_seeds
from tqtool.formats.safetensors import read_header
from tqtool.pipeline.dense import StoredDtype
from tqtool.pipeline.job import Job, JobExtras, resolve_job
from tqtool.pipeline.provenance import carried_transforms
from tqtool.pipeline.rules import DEFAULT_GROUP, Dense, Packed, Setting, packed_entry, resolve, router_rules
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.source.config import text_config
from tqtool.transform.claim import COMPANION_REASON
from tqtool.transform.companion import (
    DEDICATED_KEY,
    DEPTH_KEY,
    TAPS,
    CompanionSource,
    Tap,
    parse_tap,
    place_of,
    plan_companion,
)
from tqtool.transform.folds import OnColumns, ScaleInput
from tqtool.transform.layout import is_zero_centred
from tqtool.transform.plan import TransformPlan
from tqtool.transform.select import COMPANION_TYPE, select_family

FOLDER = "mtp"
Form = Literal["dense", "8", "4"]
FORMS: tuple[Form, ...] = ("dense", "8", "4")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionRequest:
    """What the user asked for.

    Attributes:
        form: How it is stored: dense, or packed at 8 or 4 bits in groups of 64.
        source: Folder or hub id that holds it; None looks in the trunk's source.
        tap: Where the trunk's hidden state is taken; None is what its config says, else behind the final norm.
    """

    form: Form
    source: str | None = None
    tap: Tap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A companion and the folder that it lies in; ``names`` are its tensors there."""

    checkpoint: Checkpoint
    names: tuple[str, ...]
    gain_offset: float

    def source(self, config: Mapping[str, Any]) -> CompanionSource:
        """As ``plan_companion`` takes it; ``config`` says how many layers it has if its own does not."""
        own, trunk = text_config(self.checkpoint.config), text_config(config)
        if own.get(DEDICATED_KEY, trunk.get(DEDICATED_KEY)):
            raise SourceError(
                f"{self.checkpoint.path}: config.json: {DEDICATED_KEY} is {own.get(DEDICATED_KEY, True)!r}: this "
                "companion reads an embedding table of its own, and tqtool's share the trunk's",
                hint="--mtp none leaves it out; false is right where no tensor mtp.embed_tokens.weight exists",
            )
        depth = trunk.get(DEPTH_KEY, 1) if own.get(DEPTH_KEY) is None else own[DEPTH_KEY]
        if not isinstance(depth, int) or isinstance(depth, bool) or not 0 < depth <= len(self.names):
            raise SourceError(f"config.json: {DEPTH_KEY}: expected a positive integer, found {depth!r}")
        shapes = {name: self.checkpoint.tensors[name].shape for name in self.names}
        return CompanionSource(shapes=shapes, depth=depth, gain_offset=self.gain_offset)


def companion_request(mtp: str, source: str | None, tap: str | None) -> CompanionRequest | None:
    """``--mtp none|dense|8|4`` with its options; None without a companion. Raises UserError."""
    if mtp not in (*FORMS, "none"):
        raise UserError(f"--mtp {mtp!r} is unknown", hint=f"one of none, {', '.join(FORMS)}")
    if mtp == "none" and (source is not None or tap is not None):
        raise UserError("--mtp-source and --mtp-tap without --mtp do nothing", hint="add --mtp 8, for example")
    read_at = None if tap is None else parse_tap(tap)
    return next((CompanionRequest(form=form, source=source, tap=read_at) for form in FORMS if form == mtp), None)


def plan_bundled(
    request: CompanionRequest | None,
    checkpoint: Checkpoint,
    transform: TransformPlan,
    *,
    out: Path,
    dtype: DType | None = None,
) -> Job | None:
    """The job of the companion inside the artifact ``out`` of ``checkpoint``; None if none was asked for.

    Args:
        request: What was asked for.
        checkpoint: The trunk's source.
        transform: The trunk's plan.
        out: The artifact's folder.
        dtype: Of dense values and scales; None is what the source declares.

    Raises:
        UserError: There is no companion, it carries other rotations than its trunk, or its tap is another one.
        SourceError: Its tensors do not fit the trunk's config.
    """
    if request is None:
        return None
    found = _find(checkpoint, request.source)
    tap = _tap(found, request.tap)
    _require_same_basis(checkpoint, found, transform.seed)
    family = select_family(checkpoint.config)
    source = found.source(checkpoint.config)
    plan = plan_companion(family, checkpoint.shapes(), checkpoint.config, source, seed=transform.seed, tap=tap)
    own = _own_checkpoint(checkpoint, found, plan, _config(checkpoint, transform, source.depth))
    bits = None if request.form == "dense" else int(request.form)
    packing = None if bits is None else Packed(bits=bits, group_size=DEFAULT_GROUP, mode="affine")
    default: Setting = packing or Dense()
    target = StoredDtype(own, dtype)
    rules = router_rules(plan, packing, checkpoint.config)
    choices = resolve(plan.outputs, default=default, rules=rules, dtype_of=target.of)
    extras = JobExtras(
        notes=choices.notes,
        plan_notes=(*target.notes(), *choices.counted_notes()),
        default_entry=None if packing is None else packed_entry(packing),
        dtype=target.config_dtype,
        request={"verb": "companion", **request_json(request, tap), "rotation_seed": transform.seed},
        kind="companion-float" if packing is None else "companion-affine",
        is_stock=False,
        tags=("mtp",),
        borrowed=frozenset(own.tensors) - frozenset(found.names),
    )
    return resolve_job(own, plan, choices.choose, out=out / FOLDER, extras=extras)


def request_json(request: CompanionRequest, tap: Tap) -> dict[str, Any]:
    """What manifests record of ``request``."""
    return {"form": request.form, "hidden_tap": tap}


def bundled_request(job: Job | None) -> dict[str, Any]:
    """What the trunk's manifest says of its companion."""
    return {} if job is None else {"mtp": {key: job.extras.request[key] for key in ("form", "hidden_tap")}}


def bundled_notes(job: Job | None) -> tuple[str, ...]:
    """A line for the trunk's plan, manifest and card."""
    if job is None:
        return ()
    request, rows = job.extras.request, job.plan.rows
    form = "dense" if request["form"] == "dense" else f"{request['form']}-bit"
    place = "behind" if request["hidden_tap"] == "post_norm" else "before"
    holds = (
        f"{FOLDER}/ holds its multi-token-prediction companion: {len(rows)} tensors, {form}, which read the hidden "
        f"state {place} the final norm"
    )
    return (holds, *_loss_note(job))


def _loss_note(job: Job) -> tuple[str, ...]:
    """What the rotation, of this run or of an earlier one, takes from a companion; nothing without."""
    if job.transform.seed is None and not rotation_seeds(carried_transforms(job.checkpoint)):
        return ()
    scalar = "" if job.extras.request["hidden_tap"] == "pre_norm" else ", and one scalar per token before fc,"
    verb = "is" if not scalar else "are"
    return (
        f"{FOLDER}/ drafts differ from the original's: its final gain{scalar} {verb} lost in the rotation "
        "(docs/formats/companion.md); not rotating loses nothing, and the trunk verifies every token either way",
    )


def companion_hints(transform: TransformPlan, job: Job | None) -> tuple[str, ...]:
    """A line where the source has a companion that nobody asked for."""
    if job is not None or not any(drop.reason == COMPANION_REASON for drop in transform.dropped):
        return ()
    return (f"--mtp dense, 8 or 4 keeps the multi-token-prediction companion, folded alike, in OUT/{FOLDER}",)


def _find(checkpoint: Checkpoint, source: str | None) -> _Found:
    """The companion: where the user says, among the trunk's tensors, or in a folder ``mtp`` beside them."""
    if source is not None:
        opened = open_checkpoint(source)
        found = _inside(opened)
        if found is None:
            raise UserError(
                f"{source}: holds no multi-token-prediction companion",
                hint=f"a folder of model_type {COMPANION_TYPE}, or a checkpoint with tensors mtp.*",
            )
        return found
    found = _inside(checkpoint)
    if found is None and (checkpoint.path / FOLDER / "config.json").is_file():
        beside = open_checkpoint(str(checkpoint.path / FOLDER))
        found = _inside(replace(beside, origin=checkpoint.origin))
    if found is None:
        raise UserError(
            f"{checkpoint.path}: no multi-token-prediction companion: no tensor mtp.*, no folder {FOLDER}",
            hint="--mtp-source names the folder that holds it; --mtp none leaves it out",
        )
    return found


def _inside(opened: Checkpoint) -> _Found | None:
    """The companion of a checkpoint, or the checkpoint that is one."""
    prefixed = tuple(name for name in opened.tensors if place_of(name) != name)
    if opened.model_type == COMPANION_TYPE and not prefixed:
        return _Found(checkpoint=opened, names=tuple(opened.tensors), gain_offset=0.0)
    if not prefixed:
        return None
    if len(prefixed) == len(opened.tensors):  # nothing but the companion: no trunk to go by
        files = {opened.tensors[name].path for name in prefixed}
        is_mlx = any(read_header(path).metadata.get("format") == "mlx" for path in files)
        return _Found(checkpoint=opened, names=prefixed, gain_offset=0.0 if is_mlx else 1.0)
    offset = 1.0 if is_zero_centred(opened.shapes()) else 0.0
    return _Found(checkpoint=opened, names=prefixed, gain_offset=offset)


def _tap(found: _Found, asked: Tap | None) -> Tap:
    """Asked for, or stated by a companion that tqtool wrote, or the one of mlx-vlm and vLLM."""
    stated = found.checkpoint.config.get("hidden_tap") if found.checkpoint.model_type == COMPANION_TYPE else None
    tap = next((tap for tap in TAPS if tap == stated), None)
    if stated is not None and tap is None:
        raise SourceError(f"config.json: hidden_tap: expected one of {', '.join(TAPS)}, found {stated!r}")
    if asked is not None and tap is not None and asked != tap:
        raise UserError(
            f"{found.checkpoint.path}: this companion reads the hidden state at {tap}, --mtp-tap asks for {asked}",
            hint="leave --mtp-tap out",
        )
    return asked or tap or TAPS[0]


def _require_same_basis(trunk: Checkpoint, found: _Found, seed: int | None) -> None:
    """Both sources must carry the same rotations; ``seed`` is of the rotation that this run adds to both."""
    mine, own = (rotation_seeds(carried_transforms(each)) for each in (trunk, found.checkpoint))
    if mine != own:
        whose = "its trunk" if seed is None else "the source trunk, before this run, carries"
        raise UserError(
            f"{found.checkpoint.path}: the companion carries {_seeds_text(own)}, {whose} {_seeds_text(mine)}; "
            "they share one residual stream, so both must have the same",
            hint="make both from the original checkpoint in one run, or give the companion that belongs to this trunk",
        )


def _seeds_text(seeds: tuple[int | None, ...]) -> str:
    return f"rotations of seed {', '.join(map(str, seeds))}" if seeds else "no rotation"


def _config(checkpoint: Checkpoint, transform: TransformPlan, depth: int) -> dict[str, Any]:
    """As mlx-vlm's drafter reads it."""
    whole = transform.updated_config(dict(checkpoint.config))
    is_tied = bool(whole.get("tie_word_embeddings", False))
    text = {**text_config(whole), DEPTH_KEY: depth, "tie_word_embeddings": is_tied}
    stated: dict[str, Any] = {key: whole[key] for key in ("torch_dtype", "dtype") if key in whole}
    return {
        "model_type": COMPANION_TYPE,
        "text_config": {key: value for key, value in text.items() if key not in ("text_config", "vision_config")},
        "block_size": depth + 2,
        "tie_word_embeddings": is_tied,
        **stated,
    }


def _own_checkpoint(trunk: Checkpoint, found: _Found, plan: TransformPlan, config: dict[str, Any]) -> Checkpoint:
    """What the job reads: the companion's tensors, and the trunk's final gain where it is folded in."""
    tensors = {name: found.checkpoint.tensors[name] for name in found.names}
    halves = [op.fold for output in plan.outputs for op in output.ops if isinstance(op, OnColumns)]
    gains = [fold.gain for fold in halves if isinstance(fold, ScaleInput)]
    tensors |= {name: trunk.tensors[name] for name in gains if name not in tensors}
    return replace(found.checkpoint, config=config, tensors=tensors, files=(), warnings=())
