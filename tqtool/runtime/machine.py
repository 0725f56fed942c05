"""What a measured number was measured on: processor, cores, memory, system, MLX's device, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("tqtool", "mlx", "mlx-lm", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts of this process's machine.

    Attributes:
        processor: Name of the CPU.
        logical_cores: Of the machine.
        usable_cores: This process may run on, which containers and affinity lower.
        memory_bytes: Of the machine; None if the system does not say.
        system: Name and release of the operating system.
        architecture: ``arm64``, ``x86_64`` …
        python: Version.
        device: MLX's default device: ``cpu`` or ``gpu``.
        device_facts: What MLX knows of it.
        versions: Of the packages that decide speed.
    """

    processor: str
    logical_cores: int
    usable_cores: int
    memory_bytes: int | None
    system: str
    architecture: str
    python: str
    device: str
    device_facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def machine_facts() -> Machine:
    """The facts; imports mlx, whose BLAS has to be in place before."""
    import mlx.core as mx

    device = mx.default_device()
    logical = os.cpu_count() or 1
    return Machine(
        processor=processor_name(),
        logical_cores=logical,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical,
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        python=platform.python_version(),
        device="cpu" if device.type == mx.cpu else "gpu",
        device_facts={key: value for key, value in mx.device_info(device).items() if _is_plain(value)},
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


def processor_name() -> str:
    """What people call the CPU; its architecture where the system does not say."""
    if sys.platform == "darwin":
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, platform.machine())


def load_average() -> float | None:
    """Processes that wanted a core during the last minute; None where the system does not count them."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


class PeakMemory:
    """The most memory that this process held since ``reset``, as the system counts it (resident set size).

    ``is_of_run`` is False where only the most since the start of the process is known: everywhere but on Linux.
    """

    def __init__(self) -> None:
        self.is_of_run = _reset_peak()

    def reset(self) -> None:
        """Begin again."""
        self.is_of_run = _reset_peak()

    def read(self) -> int:
        """Bytes."""
        if self.is_of_run:
            for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def _reset_peak() -> bool:
    """Let Linux forget the peak (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)
