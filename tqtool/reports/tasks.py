"""Task results of several arms as columns: what each gets right, and a paired test against one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.errors import UserError
from tqtool.evals.proportions import wilson
from tqtool.evals.task_result import TaskResult
from tqtool.evals.task_result import compare as pair

MAIN_FLAGS = ("acc", "exact_match")
"""What is shown of a choice, and of an answer; a report's other flags are in the JSON."""
INSTANT_EOS = "instant_eos"

Column = tuple[str, str]
"""Task and format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """``right`` of ``total`` outcomes have a flag; ``low`` and ``high`` are Wilson's 95 % interval."""

    right: int
    total: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Items with the main flag only here, only in the baseline; McNemar's exact two-sided ``p``."""

    only_here: int
    only_baseline: int
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One arm in one task and format: the rate of each flag, the main one's name, the test if there is a baseline."""

    task: str
    format: str
    main: str
    rates: Mapping[str, Rate]
    paired: Paired | None = None

    @property
    def column(self) -> Column:
        """Which column of a table it stands in."""
        return self.task, self.format

    @property
    def text(self) -> str:
        """Share, interval, rate of empty answers if there were any, p."""
        rate = self.rates[self.main]
        parts = [f"{100 * rate.value:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"]
        eos = self.rates.get(INSTANT_EOS)
        if eos is not None and eos.right:
            parts.append(f"EOS at once {100 * eos.value:.0f} %")
        if self.paired is not None:
            parts.append(f"p {self.paired.p:.2g}")
        return ", ".join(parts)


def columns_of(scores: Iterable[TaskScore]) -> tuple[Column, ...]:
    """The columns of all ``scores``, in the order of their first."""
    return tuple(dict.fromkeys(score.column for score in scores))


def require_alike(results: Sequence[TaskResult]) -> tuple[dict[str, Any], ...]:
    """What each task was measured on.

    Raises:
        UserError: a task was measured on other items, or with other settings, in one result than in another.
    """
    first: dict[str, TaskResult] = {}
    for result in results:
        for task in sorted({task for task, _ in result.outcomes.values()}):
            other = first.setdefault(task, result)
            if (other.items_sha256, other.settings) != (result.items_sha256, result.settings):
                raise UserError(
                    f"{result.name}: task {task} on items {result.items_sha256[:12]} with {result.settings}; in "
                    f"{other.name} on {other.items_sha256[:12]} with {other.settings}",
                    hint="run `tqtool eval tasks` on all arms with one file of items and the same options",
                )
    return tuple(
        {"task": task, "items_sha256": result.items_sha256, **result.settings} for task, result in sorted(first.items())
    )


def scores_of(results: Sequence[TaskResult], baseline: Sequence[TaskResult] | None = None) -> tuple[TaskScore, ...]:
    """Every task and format of one arm's ``results``, paired with the results of a ``baseline`` on the same items.

    Raises:
        UserError: two results of the arm have a task in common.
    """
    scores: dict[Column, TaskScore] = {}
    for result in results:
        partner = next((other for other in baseline or () if other.items_sha256 == result.items_sha256), None)
        paired = {} if partner is None else _paired(result, partner)
        for column, flags in _flags(result).items():
            if column in scores:
                raise UserError(f"{result.name}: a second result of task {column[0]} for one arm")
            main = next((name for name in MAIN_FLAGS if name in flags), next(iter(flags)))
            scores[column] = TaskScore(
                task=column[0],
                format=column[1],
                main=main,
                rates={name: _rate(values) for name, values in flags.items()},
                paired=paired.get((*column, main)),
            )
    return tuple(scores.values())


def _flags(result: TaskResult) -> dict[Column, dict[str, list[bool]]]:
    found: dict[Column, dict[str, list[bool]]] = {}
    for (_, format_), (task, flags) in result.outcomes.items():
        for name, value in flags.items():
            found.setdefault((task, format_), {}).setdefault(name, []).append(value)
    return found


def _rate(values: Sequence[bool]) -> Rate:
    right, total = sum(values), len(values)
    low, high = wilson(right, total)
    return Rate(right=right, total=total, value=right / total, low=low, high=high)


def _paired(result: TaskResult, baseline: TaskResult) -> dict[tuple[str, str, str], Paired]:
    return {
        (row.task, row.format, row.flag): Paired(only_here=row.only_a, only_baseline=row.only_b, p=row.p)
        for row in pair(result, baseline).pairings
    }


def default_name(result: TaskResult) -> str:
    """What an arm is called whose only report is ``result``."""
    return Path(result.model).name
