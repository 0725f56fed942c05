"""What the machine can take: free disk before work begins, memory as a warning in the plan."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tqtool.artifact.reload import Depth
from tqtool.errors import ArtifactError

_DISK_MARGIN = 1.02


def require_disk(parent: Path, needed_bytes: int, what: str = "the artifact") -> None:
    """Raise ArtifactError when ``parent``'s disk has less than ``needed_bytes`` free for ``what``."""
    free = shutil.disk_usage(parent).free
    if free < needed_bytes * _DISK_MARGIN:
        raise ArtifactError(
            f"{parent}: {what} needs {readable_bytes(needed_bytes)}, {readable_bytes(free)} are free",
            hint="free space on that disk or choose another output folder",
        )


def memory_note(needed_bytes: int) -> str | None:
    """A warning when the estimated peak is more than the memory available now."""
    available = available_memory_bytes()
    if available is None or needed_bytes <= available:
        return None
    return f"the job needs about {readable_bytes(needed_bytes)} of memory, {readable_bytes(available)} are available"


def affordable_depth(depth: Depth, needed_bytes: int) -> tuple[Depth, str | None]:
    """``depth``, or ``load`` with the reason when a forward would need more memory than there is.

    Being killed for memory would throw away a finished artifact.
    """
    available = available_memory_bytes()
    if depth != "forward" or available is None or needed_bytes <= available:
        return depth, None
    return "load", (
        f"the forward check is reduced to a load check: it needs about {readable_bytes(needed_bytes)} of memory, "
        f"{readable_bytes(available)} are available"
    )


def available_memory_bytes() -> int | None:
    """Memory that can be used without swapping, or None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def readable_bytes(count: float) -> str:
    """``1.3 GB``: decimal units, as disks and hubs count."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
