"""Peak memory of a piece of code, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

# ru_maxrss survives exec on Linux, so a child of a large process starts with its parent's peak; VmHWM does not.
PEAK = """
def peak_bytes():
    import resource, sys
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
"""


def added_peak_bytes(prepare: str, measured: str, *arguments: object) -> int:
    """Bytes by which ``measured`` raises the peak reached by ``prepare``; both see ``sys.argv[1:]``."""
    code = f"{PEAK}\n{prepare}\nstart = peak_bytes()\n{measured}\nprint(peak_bytes() - start)"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)
