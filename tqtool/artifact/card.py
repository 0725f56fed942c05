"""``README.md`` of an artifact: the front matter that hubs read, how to run it, what it weighs, how it was made.

All of it is read off the artifact itself: its manifest, its config, the front matter of the source's card. A licence is
copied if the source's card states it; it is never guessed. Conventions: anchors of the hub's own metadata
(``library_name``, ``base_model_relation``), see https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tqtool.artifact.reader import SHARD_GLOB
from tqtool.formats.manifest import Manifest
from tqtool.formats.measured import Measured, MeasuredArm
from tqtool.kernels.metal_kernels import METAL_SWITCH

CARD_NAME = "README.md"
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
STATED = ("license", "license_name", "license_link", "language")
"""What is taken from the source's card as it stands there."""
PLACE = "FOLDER_OR_REPO"
"""Stands in commands for where the artifact lies, which it does not know itself."""
RECIPE_NAME = "tqtool/recipe.yaml"
MOST_NOTES = 12
"""Remarks about single tensors that are listed; how many more there are is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the card says beyond the manifest.

    Attributes:
        title: Heading.
        base_model: Hub id of the source, or None for a local folder.
        stated: Front matter fields of the source's card, those in ``STATED``.
        is_quantized: Sets ``base_model_relation``.
        needs_code: True when stock mlx-lm builds the model from the module file that it ships.
        place: Repository or folder in the commands.
        tags: Added to ``mlx`` and ``tqtool``.
        measured: The table of measurements.
    """

    title: str
    base_model: str | None
    stated: Mapping[str, Any]
    is_quantized: bool
    needs_code: bool
    place: str = PLACE
    tags: Sequence[str] = ()
    measured: Measured | None = None


def render_card(manifest: Manifest, facts: CardFacts) -> bytes:
    """The card's bytes; ``manifest`` need not list the card itself yet."""
    sections = [
        _front_matter(manifest, facts),
        f"# {facts.title}",
        _introduction(facts),
        "## Size",
        *_size(manifest),
        "## Run it",
        *_usage(facts),
        *_measured(facts.measured),
        "## How it was made",
        *_made(manifest),
        *_deviations(manifest),
        "## Licence",
        _licence(manifest, facts),
        "## Check it",
        "`tqtool/manifest.json` lists every tensor and the SHA-256 of every file. `tqtool verify FOLDER` checks them, "
        "decodes a sample and loads the model in stock mlx-lm.",
    ]
    return ("\n\n".join(sections) + "\n").encode()


def stated_fields(card: Path | None, names: Sequence[str] = STATED) -> dict[str, Any]:
    """Fields ``names`` of a card's front matter, as they stand there: text, or a list of text.

    Empty if there is no card, or its front matter cannot be read: nothing is concluded from that.
    """
    if card is None or not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff")
    if not text.startswith("---\n"):
        return {}
    head, closed, _ = text[4:].partition("\n---")
    if not closed:
        return {}
    try:
        # Everything stays text: `language: no` is Norwegian and not False.
        found = yaml.load(head, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: found[name] for name in names if _is_text(found.get(name))}


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return isinstance(value, str) and value != ""


def _front_matter(manifest: Manifest, facts: CardFacts) -> str:
    front: dict[str, Any] = {"library_name": "mlx", "pipeline_tag": "text-generation", **facts.stated}
    link = front.get("license_link")
    if isinstance(link, str) and "://" not in link and link.removeprefix("./") not in manifest.files:
        # A file of the source's repository that is not here: the link would be dead.
        del front["license_link"]
        if facts.base_model is not None:
            front["license_link"] = f"https://huggingface.co/{facts.base_model}/blob/main/{link.removeprefix('./')}"
    if facts.base_model is not None:
        front["base_model"] = facts.base_model
        if facts.is_quantized:
            front["base_model_relation"] = "quantized"
    front["tags"] = list(dict.fromkeys(("mlx", "tqtool", *facts.tags)))
    text = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---"


def _introduction(facts: CardFacts) -> str:
    hub = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
    source = "A local model" if facts.base_model is None else hub
    return f"{source}, {'quantized' if facts.is_quantized else 'converted'} by tqtool."


def card_title(name: str, manifest: Manifest) -> str:
    """Heading of the card of a model ``name``: its format, and its size in bits per weight."""
    return f"{name}, {manifest.kind} {_bits_per_weight(manifest):.2f} bits"


def _weight_bytes(manifest: Manifest) -> int:
    return sum(record.size_bytes for name, record in manifest.files.items() if Path(name).match(SHARD_GLOB))


def _bits_per_weight(manifest: Manifest) -> float:
    """All bytes of the weight files over the weights of the source: an untied head is no free parameter."""
    return 8 * _weight_bytes(manifest) / manifest.totals.source_parameters


def _size(manifest: Manifest) -> Iterator[str]:
    totals, size = manifest.totals, f"{_weight_bytes(manifest):,} bytes of weight files"
    weights = f"{totals.source_parameters:,} weights"
    labels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in manifest.tensors:
        labels[tensor.quantizer] += tensor.parameters
        counts[tensor.quantizer] += 1
    stored = "; ".join(
        f"{label}: {counts[label]} tensors, {100 * share / totals.parameters:.1f} % of the weights"
        for label, share in labels.most_common()
    )
    yield _table(
        ("", ""),
        [
            ("bits per weight", f"{_bits_per_weight(manifest):.3f}: {size} over the {weights} of the source"),
            ("of the codes alone", f"{totals.code_bits_per_weight:.3f}"),
            ("stored as", stored),
        ],
    )


def _usage(facts: CardFacts) -> Iterator[str]:
    trust = " --trust-remote-code" if facts.needs_code else ""
    yield "In stock mlx-lm, without tqtool:"
    yield f'```sh\npip install "mlx-lm>=0.32"\nmlx_lm.generate --model {facts.place}{trust} --prompt "Hello"\n```'
    if facts.needs_code:
        yield (
            "`--trust-remote-code` lets mlx-lm run `tqtool_model.py`, a file of this model that decodes its packed "
            "layers; without the flag mlx-lm refuses to load the model. `mlx_lm.server` takes the same flag. NVIDIA "
            "cards of compute capability 9.0 run its CUDA kernels. Elsewhere MLX operations decode, which is slow; on "
            f"an Apple GPU `{METAL_SWITCH}=1` in the environment runs its Metal kernels, which pass their tests under "
            "an executor of Metal text and have run on no Apple GPU yet."
        )
    yield "In tqtool, which has compiled CPU kernels too:" if facts.needs_code else "In tqtool:"
    yield f'```sh\ntqtool generate {facts.place} --prompt "Hello"\n```'


def _measured(measured: Measured | None) -> Iterator[str]:
    if measured is None:
        return
    yield "## Measured"
    has_distance = any(arm.kl is not None for arm in measured.arms)
    tasks = tuple(dict.fromkeys(task for arm in measured.arms for task in arm.tasks))
    columns = ["model", "bits per weight", "MB"]
    if has_distance:
        columns += ["KL ± se", "perplexity", "same first token"]
    rows = [
        (*_arm_cells(arm, has_distance=has_distance), *(arm.tasks.get(task, "–") for task in tasks))
        for arm in measured.arms
    ]
    yield _table((*columns, *tasks), rows)
    if has_distance:
        yield "KL: mean distance to the full-precision model, nats per token. Bits over the source's weights."
    yield "\n".join(f"* {_text(line)}" for line in measured.conditions)


def _arm_cells(arm: MeasuredArm, *, has_distance: bool) -> tuple[str, ...]:
    name = f"**{_text(arm.name)}** (this model)" if arm.is_this else _text(arm.name)
    cells = (name, f"{arm.bits_per_weight:.3f}", f"{arm.weight_bytes / 1e6:.1f}")
    if not has_distance:
        return cells
    if arm.kl is None or arm.ppl is None or arm.top1 is None:
        return (*cells, "–", "–", "–")
    return (*cells, f"{arm.kl:.4f} ± {arm.kl_se or 0:.4f}", f"{arm.ppl:.2f}", f"{100 * arm.top1:.1f} %")


def _made(manifest: Manifest) -> Iterator[str]:
    source = manifest.source
    transforms = ", ".join(
        record.id if record.seed is None else f"{record.id} (seed {record.seed})" for record in manifest.transforms
    )
    asked = {key: value for key, value in manifest.request.items() if _says(value)}
    rows = [
        ("format", manifest.kind),
        ("source", source.location + (f" at `{source.revision}`" if source.revision else "")),
        ("source content", f"`{source.content_sha256}`"),
        ("transforms", transforms or "none"),
        *((key.replace("_", " "), _value(value)) for key, value in asked.items()),
        ("made with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())),
    ]
    yield _table(("", ""), rows)
    if RECIPE_NAME in manifest.files:
        yield f"The whole run is `{RECIPE_NAME}`: `tqtool run {RECIPE_NAME} OUT` repeats it."


def _says(value: Any) -> bool:
    """Whether a field of the request says something: nothing asked for is no row; a seed of 0 is one."""
    return value is not False and value not in (None, [], {}, "")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(each)}" for key, each in value.items() if _says(each))
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value)


def _deviations(manifest: Manifest) -> Iterator[str]:
    """What went another way than a paper or the user had it: of transforms, of the job, of single tensors."""
    lines = [f"{record.id}: {deviation}" for record in manifest.transforms for deviation in record.deviations]
    lines += manifest.notes
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for tensor in manifest.tensors:
        for note in dict.fromkeys(tensor.all_notes()):
            counts[note] += 1
            first.setdefault(note, tensor.name)
    listed = counts.most_common(MOST_NOTES)
    lines += [f"{first[note]}{f' and {count - 1} more' if count > 1 else ''}: {note}" for note, count in listed]
    if len(counts) > len(listed):
        lines.append(f"{len(counts) - len(listed)} more remarks about single tensors are in the manifest")
    if lines:
        yield "## Deviations and fallbacks"
        yield "\n".join(f"* {_text(line)}" for line in lines)


def _licence(manifest: Manifest, facts: CardFacts) -> str:
    files = [name for name in manifest.files if name.upper().startswith(LICENCE_NAMES)]
    copied = f"Copied from the source: {', '.join(f'`{name}`' for name in files)}. " if files else ""
    if "license" in facts.stated:
        return copied + f"The licence of the source, `{_value(facts.stated['license'])}`, holds for this model too."
    return copied + "The source's card states no licence, so none is stated here: look where the source comes from."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(text: str) -> str:
    """``text`` in one line that Markdown leaves as it is; globs have stars, placeholders angle brackets."""
    return " ".join(text.split()).replace("*", "\\*").replace("<", "\\<")
