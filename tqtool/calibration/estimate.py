"""What a calibration will take, from the shapes of the largest layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tqtool.transform.plan import OutputTensor, Role, TransformPlan

BASE_MEMORY_BYTES = 500 << 20


_SAME_INPUT = {
    Role.K: Role.Q,
    Role.V: Role.Q,
    Role.UP: Role.GATE,
    Role.RATE: Role.LINEAR_IN,
}


@dataclass(slots=True)
class _Layer:
    """One layer: its weights; widths of inputs that are summed, by reader; of stacks of experts, by reader."""

    weights: int = 0
    summed: dict[Role, int] = field(default_factory=dict)
    stacks: dict[Role, OutputTensor] = field(default_factory=dict)

    def stored_bytes(self) -> int:
        """Triangles on disk."""
        dense = sum(2 * width * (width + 1) for width in self.summed.values())
        return dense + sum(
            2 * len(stack.parts) * stack.shape[-1] * (stack.shape[-1] + 1) for stack in self.stacks.values()
        )

    def memory_bytes(self, tokens: int, longest: int, top: int) -> int:
        """Weights twice while they are folded; then once, with sums, one made ready for its file, rows for experts."""
        moments = 8 * sum(width * width for width in self.summed.values())
        kept = sum(
            4 * tokens * stack.shape[-1] * (top if role is Role.DOWN else 1) for role, stack in self.stacks.items()
        )
        widths = [*self.summed.values(), *(stack.shape[-1] for stack in self.stacks.values())]
        one = 8 * max((stack.shape[-1] ** 2 for stack in self.stacks.values()), default=0)
        stored = 10 * max(self.summed.values(), default=0) ** 2  # the mean of one sum, and its triangle
        running = moments + kept + one + stored + 16 * longest * max(widths)
        return max(8 * self.weights, 4 * self.weights + running)


def estimates(plan: TransformPlan, *, tokens: int, longest: int, hidden: int, top: int) -> dict[str, int]:
    """Peak memory and disk in bytes.

    Args:
        plan: Of the calibration.
        tokens: In all sequences.
        longest: Tokens of the longest sequence.
        hidden: Width of the residual stream.
        top: Experts that a token goes to.
    """
    layers: dict[int, _Layer] = {}
    for output in plan.outputs:
        if output.layer is None or output.module is None:
            continue
        layer = layers.setdefault(output.layer, _Layer())
        layer.weights += math.prod(output.shape)
        if output.parts:
            layer.stacks[_reader(output.role)] = output
        else:
            layer.summed[_reader(output.role)] = output.shape[-1]
    states = 4 * hidden * tokens
    peak = max(layer.memory_bytes(tokens, longest, top) for layer in layers.values())
    return {
        "peak_memory_bytes": BASE_MEMORY_BYTES + 2 * states + peak,
        "disk_bytes": sum(layer.stored_bytes() for layer in layers.values()) + 2 * states + 2 * hidden * (hidden + 1),
    }


def _reader(role: Role) -> Role:
    """q, k and v read one input, gate and up another, linear attention one; a router is summed apart."""
    return _SAME_INPUT.get(role, role)
