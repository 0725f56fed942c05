"""Whose weights a run is about: noted in ``OUT/source.json`` when it begins, held against what it finds later.

Two checks, for two mistakes. The note, a sample of every tensor, is read at once and sees a source that changed under
the run: every step is of one source. Artifacts say in their manifests which tensors they were made from; those that are
found are held against all of the source's, which takes one pass over it and sees one that came from another run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from tqtool.artifact.output import whole_file
from tqtool.artifact.reader import read_manifest
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.provenance import source_name, used_content
from tqtool.recipes.opened import OpenRun
from tqtool.source.checkpoint import TensorRef
from tqtool.source.fingerprint import fingerprint

SOURCE_NAME: Final = "source.json"
AGAIN: Final = "remove it and run again"

_READ_BYTES: Final = 1 << 26


def hold_source(run: OpenRun, *, is_new: bool) -> str | None:
    """Note the source in ``OUT``, or hold it against the note; a remark where an older run has left none.

    Raises:
        UserError: the run was begun on other weights.
        ArtifactError: the note is damaged, or cannot be written.
    """
    path, found = run.out / SOURCE_NAME, fingerprint(run.checkpoint)
    if not path.exists():
        others = [other for other in run.out.iterdir() if other.name != "recipe.yaml"]
        with whole_file(path) as (file, _):
            file.write(json.dumps({"source": source_name(run.checkpoint), "sample_sha256": found}, indent=1).encode())
        if is_new or not others:  # a run may be killed between the recipe and this file
            return None
        return "noted now; an earlier tqtool made what was here and did not note it"
    try:
        noted = json.loads(path.read_bytes())["sample_sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error})", hint="choose another OUT") from error
    if noted != found:
        raise UserError(
            f"{run.out}: was begun on other weights than {run.checkpoint.path} holds now "
            f"(sample {str(noted)[:12]}, found {found[:12]})",
            hint="choose another OUT, or give the source that it was begun on",
        )
    return None


def require_made_from(run: OpenRun, folder: Path) -> None:
    """ArtifactError unless the artifact ``folder`` was made from the source: every tensor, its layout and config.

    The first call of a run reads the source once, in pieces.
    """
    manifest, here = read_manifest(folder), _tensor_sha256(run)
    # A plan claims every tensor that a fold reads, so each that was used has a row.
    used = {name: digest for record in manifest.tensors for name, digest in record.sources().items()}
    for name, digest in used.items():
        found = here.get(name)
        if found != digest:
            raise ArtifactError(
                f"{folder}: made from another source than {run.checkpoint.path}: {name} was "
                f"{digest[:12]}, found {'nothing' if found is None else found[:12]}",
                hint=AGAIN,
            )
    if manifest.source.content_sha256 != used_content(run.checkpoint, used):
        raise ArtifactError(
            f"{folder}: made from another source than {run.checkpoint.path}: equal tensors, another config.json or "
            "other weight files",
            hint=AGAIN,
        )


def _tensor_sha256(run: OpenRun) -> dict[str, str]:
    if not run.digests:
        with run.progress("hash source", run.checkpoint.nbytes) as advance:
            for name, ref in run.checkpoint.tensors.items():
                run.digests[name] = _sha256(ref)
                advance(ref.nbytes, name)
    return run.digests


def _sha256(ref: TensorRef) -> str:
    digest, flat = hashlib.sha256(), replace(ref, dtype=DType.U8, shape=(ref.nbytes,))
    for start in range(0, ref.nbytes, _READ_BYTES):
        digest.update(flat.read_rows(start, min(start + _READ_BYTES, ref.nbytes)).data)
    return digest.hexdigest()
