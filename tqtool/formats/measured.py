"""``tqtool/measured.json``: what was measured of an artifact and of the arms beside it, for its model card.

Written by ``tqtool card`` from reports; kept in the artifact so that the card can be written again without them. It
holds names and figures, no paths: it is made to be published.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tqtool.errors import ArtifactError
from tqtool.formats.manifest import parse_object

MEASURED_NAME = "tqtool/measured.json"
Figure = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeasuredArm(_Model):
    """One model: its size, its distance from the teacher (nats per token), its tasks as text by ``task format``."""

    name: str
    is_this: bool
    weight_bytes: Annotated[int, Field(ge=0)]
    bits_per_weight: Figure
    kl: Figure | None = None
    kl_se: Figure | None = None
    ppl: Figure | None = None
    top1: Figure | None = None
    tasks: dict[str, str] = {}


class Measured(_Model):
    """Arms from small to large and what they were measured on, a line each; ``model_hash`` is that of this artifact."""

    format_version: Literal[1] = 1
    model_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    arms: list[MeasuredArm]
    conditions: list[str]


def encode_measured(measured: Measured) -> bytes:
    """The file's bytes."""
    return (json.dumps(measured.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def parse_measured(data: bytes, where: str = MEASURED_NAME) -> Measured:
    """Read the file; ArtifactError if it is not what ``encode_measured`` writes."""
    value: dict[str, Any] = parse_object(data, where, allow_nan=False)
    try:
        return Measured.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise ArtifactError(
            f"{where}: {place}: {first['msg']}", hint="remove it, and give `tqtool card` the reports again"
        ) from error
