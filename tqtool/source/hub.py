"""Hub ids: a snapshot in the local Hugging Face cache, downloaded if the hub may be asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tqtool.errors import SourceError

# Loaders (mlx-lm) fetch the first set; a snapshot they made counts as complete without the second.
LOADER_PATTERNS: Final = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.jinja",
)
LICENCE_PATTERNS: Final = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "README.md")
"""Texts of licences, and the card, whose front matter names the licence."""
_HUB_ID: Final = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def is_hub_id(text: str) -> bool:
    """True for ``organization/name`` as the hub spells ids; says nothing about existence."""
    return _HUB_ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def resolve_snapshot(repo: str, *, revision: str | None) -> tuple[Path, str | None]:
    """The snapshot folder of ``repo`` and the commit it is at.

    ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_TOKEN`` mean what they mean to huggingface_hub.

    Raises:
        SourceError: unknown repository or revision, no permission, or offline and not (wholly) in the cache.
    """
    # Costs 0.3 s, and most calls are on local folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo}@{revision}" if revision else repo
    try:
        try:
            folder = snapshot_download(repo, revision=revision, allow_patterns=[*LOADER_PATTERNS, *LICENCE_PATTERNS])
        except IncompleteSnapshotError:
            folder = snapshot_download(repo, revision=revision, allow_patterns=list(LOADER_PATTERNS))
    except IncompleteSnapshotError as error:
        raise SourceError(
            f"{at}: only part of the snapshot is in the local cache, and the hub cannot be asked for the "
            f"rest ({error})",
            hint="go online once and run again, or give a complete local folder",
        ) from error
    except GatedRepoError as error:
        raise SourceError(
            f"{at}: the repository is gated", hint="accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{at}: no such folder here, and no such repository on the hub (or it is private)",
            hint="check the spelling; for a private repository set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{at}: the repository has no such revision", hint="check --revision") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"{at}: no such folder here, not in the local Hugging Face cache, and the hub cannot be reached",
            hint="unset HF_HUB_OFFLINE, check the connection, or give the folder of a copy",
        ) from error
    except Exception as error:  # whatever the transport raises half-way: another library for each hub version
        raise SourceError(
            f"{at}: cannot be fetched from the hub ({type(error).__name__}: {error})",
            hint="try again, or give the folder of a copy",
        ) from error
    path = Path(folder)
    return path, path.name if _COMMIT.fullmatch(path.name) else None
