"""The save interval that loses least, at the failure rate and the cost of a save that were seen in a run.

The model is that of checkpoints with random failures: the training runs for a time T, a save blocks it for a time C,
and failures come at random with a mean time M between them. A failure loses the time since the last save. Young
found that ``sqrt(2 C M)`` loses least if C is much smaller than M. Daly's estimate is close to the optimum for all C:

- J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974,
  pages 530 and 531.
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
  Systems 22 (3), 2006, pages 303 to 312: the interval of `best_interval`, and the complete model of `lost_share`.
- F. Garwood, "Fiducial limits for the Poisson distribution", Biometrika 28 (3/4), 1936, pages 437 to 442: the limits of
  the failure rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ckptcore_recovery.watchdog.goodput import Goodput, seconds

_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The save interval of a run. Times are seconds of training between two saves, without the saves.

    Attributes:
        cost: the time for which a save blocks the training.
        now: the interval of the run so far.
        best: the interval that loses least; None if no failure was seen.
        shortest, longest: the limits of `best` that the number of failures allows, with 95 % confidence. Without a
            failure there is no longest interval: None.
        failure_seconds: the mean time between failures; None if no failure was seen.
        lost_now, lost_best: the parts of the time that saves and the work since the last save take, at `now` and at
            `best`, from 0 to 1; None if no failure was seen.
        step: the time of a step, with the time between steps.
    """

    cost: float
    now: float
    best: float | None
    shortest: float
    longest: float | None
    failure_seconds: float | None
    lost_now: float | None
    lost_best: float | None
    step: float


def save_interval_of(goodput: Goodput) -> SaveInterval | None:
    """Return the save interval of a run; None if it has no save that blocked the training, or no step."""
    parts = goodput.parts
    training = seconds(parts["productive"] + parts["repeated"] + parts["between"])
    cost = seconds(parts["saving"]) / goodput.saves if goodput.saves else 0.0
    if not cost or not training or not goodput.steps:
        return None
    up = seconds(goodput.total - parts["stopped"] - parts["down"])
    now, step = training / goodput.saves, training / goodput.steps
    fewest, most = failure_limits(goodput.failures)
    shortest = best_interval(cost, up / most)
    if not goodput.failures:
        return SaveInterval(cost, now, None, shortest, None, None, None, None, step)
    between = up / goodput.failures
    best = best_interval(cost, between)
    return SaveInterval(
        cost=cost,
        now=now,
        best=best,
        shortest=shortest,
        longest=best_interval(cost, up / fewest),
        failure_seconds=between,
        lost_now=lost_share(now, cost, between),
        lost_best=lost_share(best, cost, between),
        step=step,
    )


def best_interval(cost: float, between: float) -> float:
    """Return the interval that loses least.

    Args:
        cost: the seconds of a save.
        between: the mean seconds between two failures.
    """
    if cost >= 2 * between:
        return between
    ratio = math.sqrt(cost / (2 * between))
    return math.sqrt(2 * cost * between) * (1 + ratio / 3 + ratio * ratio / 9) - cost


def lost_share(interval: float, cost: float, between: float) -> float:
    """Return the part of the time that saves and lost work take, from 0 to 1. See `best_interval`."""
    exponent = (interval + cost) / between
    return 1.0 if exponent > 700 else 1 - interval / (between * math.expm1(exponent))


def failure_limits(failures: int) -> tuple[float, float]:
    """Return the lowest and the highest mean number of failures at which the seen number is not unlikely.

    With at least one failure, each limit is exceeded with a probability of 2.5 %. Without a failure, the lowest is 0,
    and the highest is exceeded with a probability of 5 %.
    """
    tail = (1 - _CONFIDENCE) / (2 if failures else 1)
    fewest = _mean_of(failures - 1, 1 - tail) if failures else 0.0
    return fewest, _mean_of(failures, tail)


def _mean_of(most: int, probability: float) -> float:
    """Return the mean of the Poisson distribution in which at most `most` events have a probability."""
    low, high = 0.0, 2.0 * most + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        terms = (math.exp(count * math.log(middle) - middle - math.lgamma(count + 1)) for count in range(most + 1))
        low, high = (middle, high) if math.fsum(terms) > probability else (low, middle)
    return (low + high) / 2
