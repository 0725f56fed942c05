"""``tqtool bench``: tokens per second of one model, or of two that take turns, with what they were measured on.

Every model has a process of its own, so that its memory is its own. At each number of prompt tokens every arm and KV
scheme runs once to warm up; then come the rounds, in which all of them run once, every second round in the reverse
order. What is reported is the median with the lowest and highest, of the ratios too, each of which is of one round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqtool.errors import UserError
from tqtool.kv.scheme import parse_options
from tqtool.runtime.machine import load_average
from tqtool.runtime.speed import Point, Run
from tqtool.runtime.speed_worker import LoadRequest, Worker

FORMAT = "tqtool-bench-1"
STOCK = "mlx-lm:"
"""Before a model: as stock mlx-lm runs it."""
BUSY_SHARE = 0.25
"""Other work on the machine, as a share of its cores, from which on a remark is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRequest:
    """What is to be measured.

    Attributes:
        model: Folder or hub id, or that with ``mlx-lm:`` before it.
        against: Another one.
        prompt_tokens: Each is a point of its own.
        new_tokens: Written at each.
        kv: KV schemes, None for the full cache; stock mlx-lm has the full one only.
        kv_start: Tokens kept as floats until there are so many.
        repeats: Rounds that count.
        warmup: Rounds before that do not.
        compute: Of trellis and affine layers, ``packed`` or ``expand``.
        activations: ``float`` or ``int8``.
    """

    model: str
    against: str | None = None
    prompt_tokens: tuple[int, ...] = (512,)
    new_tokens: int = 64
    kv: tuple[str | None, ...] = (None,)
    kv_start: int = 0
    repeats: int = 5
    warmup: int = 1
    compute: str = "packed"
    activations: str = "float"

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmup < 0:
            raise UserError(f"--repeats {self.repeats} --warmup {self.warmup}: expected at least 1 and 0")
        if not self.prompt_tokens or len(set(self.prompt_tokens)) < len(self.prompt_tokens):
            raise UserError(f"--prompt-tokens {list(self.prompt_tokens)}: expected numbers that differ")
        names = [parse_options(text, 0).name for text in self.kv]
        if not names or len(set(names)) < len(names):
            raise UserError(f"--kv-quant {names}: expected schemes that differ")
        for count in self.prompt_tokens:
            Point(prompt_tokens=count, new_tokens=self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, lowest and highest of ``n`` values."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One arm at one point: what its runs were, and their spreads. ``kv`` is None for the full cache."""

    prompt_tokens: int
    new_tokens: int
    kv: str | None
    prompt_tokens_per_s: Spread
    new_tokens_per_s: Spread
    first_token_s: Spread
    cache_bytes: int
    peak_rss_bytes: int
    is_peak_of_run: bool
    mlx_peak_bytes: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedArm:
    """One model: as it was named, how it was loaded, and its results."""

    name: str
    model: str
    engine: str
    load: dict[str, Any]
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The model's rates over the other's at one point, of each round; ``wins`` are rounds in which it was faster."""

    prompt_tokens: int
    kv: str | None
    against_kv: str | None
    prompt_tokens_per_s: Spread
    new_tokens_per_s: Spread
    prompt_wins: int
    new_wins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """All that ``--json`` prints."""

    machine: dict[str, Any]
    load_average: float | None
    settings: dict[str, Any]
    arms: tuple[SpeedArm, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]
    format: str = FORMAT


class Runs(Protocol):
    """A loaded model that can be measured: a ``Worker``, or what tests put in its place."""

    facts: dict[str, Any]

    def run(self, prompt_tokens: int, new_tokens: int, kv: str | None, kv_start: int = 0) -> Run:
        """One run."""


Tick = Callable[[str], None]


@dataclass(slots=True)
class _Lane:
    """One arm with one KV scheme, and its runs by prompt tokens."""

    arm: int
    kv: str | None
    runs: dict[int, list[Run]] = field(default_factory=dict)


def run_speed(request: SpeedRequest, tick: Tick, start: Callable[[LoadRequest], Any] = Worker) -> SpeedReport:
    """Measure what ``request`` asks for; ``tick`` is called with a word after every run.

    Raises:
        UserError: a model that cannot be loaded, or cannot have such a KV cache.
        BackendError: the process of a model ended.
    """
    before = load_average()
    asked = [_load_request(text, request) for text in (request.model, request.against) if text is not None]
    with ExitStack() as stack:
        workers: list[Runs] = [stack.enter_context(start(each)) for each in asked]
        lanes = [
            _Lane(arm, kv)
            for arm, each in enumerate(asked)
            for kv in (request.kv if each.engine == "tqtool" else (None,))
        ]
        for count in request.prompt_tokens:
            _rounds(request, count, lanes, workers, tick)
    arms = tuple(
        SpeedArm(
            name=_name(each),
            model=each.model,
            engine=each.engine,
            load={key: value for key, value in worker.facts.items() if key != "machine"},
            results=tuple(
                _result(lane, count, request) for count in request.prompt_tokens for lane in lanes if lane.arm == number
            ),
        )
        for number, (each, worker) in enumerate(zip(asked, workers, strict=True))
    )
    return SpeedReport(
        machine=workers[0].facts["machine"],
        load_average=before,
        settings=asdict(request),
        arms=arms,
        ratios=tuple(_ratios(request, lanes)) if request.against is not None else (),
        notes=tuple(_notes(request, workers, before)),
    )


def total_runs(request: SpeedRequest) -> int:
    """How often ``run_speed`` calls its ``tick``."""
    lanes = 0
    for text in (request.model, request.against):
        if text is not None:
            lanes += 1 if text.startswith(STOCK) else len(request.kv)
    return lanes * len(request.prompt_tokens) * (request.warmup + request.repeats)


def _rounds(request: SpeedRequest, count: int, lanes: list[_Lane], workers: Sequence[Runs], tick: Tick) -> None:
    for number in range(-request.warmup, request.repeats):
        for lane in lanes if number % 2 == 0 else reversed(lanes):
            done = workers[lane.arm].run(count, request.new_tokens, lane.kv, request.kv_start if lane.kv else 0)
            if number >= 0:
                lane.runs.setdefault(count, []).append(done)
            tick(f"{count} tokens, KV {parse_options(lane.kv, 0).name or 'full'}")


def _load_request(text: str, request: SpeedRequest) -> LoadRequest:
    if text.startswith(STOCK):
        return LoadRequest(model=text.removeprefix(STOCK), engine="mlx-lm")
    return LoadRequest(
        model=text, compute=request.compute, activations=request.activations, prompts=request.prompt_tokens
    )


def _name(request: LoadRequest) -> str:
    name = Path(request.model).name
    return f"{name} in stock mlx-lm" if request.engine == "mlx-lm" else name


def _result(lane: _Lane, count: int, request: SpeedRequest) -> Result:
    runs = lane.runs[count]
    return Result(
        prompt_tokens=count,
        new_tokens=request.new_tokens,
        kv=parse_options(lane.kv, request.kv_start if lane.kv else 0).name,
        prompt_tokens_per_s=spread([run.prompt_tokens_per_s for run in runs]),
        new_tokens_per_s=spread([run.new_tokens_per_s for run in runs]),
        first_token_s=spread([run.first_token_s for run in runs]),
        cache_bytes=max(run.cache_bytes for run in runs),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        is_peak_of_run=all(run.is_peak_of_run for run in runs),
        mlx_peak_bytes=max(run.mlx_peak_bytes for run in runs),
        runs=tuple(runs),
    )


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values), n=len(values))


def _ratios(request: SpeedRequest, lanes: Sequence[_Lane]) -> list[Ratio]:
    """Of each of the model's lanes to the other's of the same KV scheme, or to its full cache if it has no such."""
    theirs = {lane.kv: lane for lane in lanes if lane.arm == 1}
    found = []
    for count in request.prompt_tokens:
        for lane in (lane for lane in lanes if lane.arm == 0):
            other = theirs.get(lane.kv, theirs.get(None))
            assert other is not None, "stock mlx-lm has the full cache, and all others what is asked for"
            pairs = list(zip(lane.runs[count], other.runs[count], strict=True))
            prompt = [ours.prompt_tokens_per_s / peer.prompt_tokens_per_s for ours, peer in pairs]
            new = [ours.new_tokens_per_s / peer.new_tokens_per_s for ours, peer in pairs]
            found.append(
                Ratio(
                    prompt_tokens=count,
                    kv=parse_options(lane.kv, 0).name,
                    against_kv=parse_options(other.kv, 0).name,
                    prompt_tokens_per_s=spread(prompt),
                    new_tokens_per_s=spread(new),
                    prompt_wins=sum(ratio > 1 for ratio in prompt),
                    new_wins=sum(ratio > 1 for ratio in new),
                )
            )
    return found


def _notes(request: SpeedRequest, workers: Sequence[Runs], before: float | None) -> list[str]:
    """What makes figures less than they seem."""
    notes = []
    cores = workers[0].facts["machine"]["usable_cores"]
    if before is not None and before > BUSY_SHARE * cores:
        notes.append(f"the machine was busy: {before:.1f} processes wanted its {cores} cores in the minute before")
    if request.repeats < 3:
        notes.append(f"{request.repeats} rounds say little of the spread")
    most = max(request.prompt_tokens) + request.new_tokens
    for worker, text in zip(workers, (request.model, request.against), strict=False):
        positions = worker.facts.get("positions")
        if isinstance(positions, int) and most > positions:
            notes.append(f"{text}: made for {positions} positions, run up to {most}: speed only, not sense")
        if worker.facts["blas"]["status"] == "slow":
            notes.append(f"{text}: MLX's products go through the reference BLAS, tens of times slower than need be")
    return notes
