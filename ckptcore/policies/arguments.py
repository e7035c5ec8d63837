"""Arguments of policies, checked: whole numbers, seconds and collections of steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable

__all__ = ["check_policies", "seconds", "step_numbers", "whole_number"]


def whole_number(owner: object, name: str, value: object, at_least: int) -> int:
    """The value as an int, also where it is NumPy's.

    Raises:
        ValueError: for a bool, a float, and for what is below `at_least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # it raises TypeError
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise ValueError(f"{_argument(owner, name, value)}: give a whole number of at least {at_least}")
    return number


def seconds(owner: object, name: str, value: object, at_least: float | None = None) -> float:
    """The value as a float of seconds.

    Args:
        at_least: the least that is allowed; None: anything above 0.

    Raises:
        ValueError: for a bool, NaN, infinity, what is no number, and what is too small.
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]  # it raises TypeError
    except TypeError:
        number = math.nan
    if not math.isfinite(number) or (number <= 0 if at_least is None else number < at_least):
        bound = "above 0" if at_least is None else f"of at least {at_least:g}"
        hint = "; of a timedelta take total_seconds()" if hasattr(value, "total_seconds") else ""
        raise ValueError(f"{_argument(owner, name, value)}: give a finite number of seconds {bound}{hint}")
    return number


def step_numbers(owner: object, name: str, value: object) -> frozenset[int]:
    """The value as a set of steps.

    Raises:
        TypeError: for what is no collection.
        ValueError: for a step that is no whole number of at least 0.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise TypeError(f"{_argument(owner, name, value)}: give a collection of steps, such as [100, 200]")
    return frozenset(whole_number(owner, name, step, at_least=0) for step in value)


def check_policies(owner: object, value: object, protocol: type) -> None:
    """That these are policies.

    Args:
        protocol: what each of them is an instance of; it can be checked at runtime.

    Raises:
        TypeError: where one of them is something else.
        ValueError: where there is none.
    """
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise TypeError(f"{_argument(owner, 'policies', value)}: give a list of policies")
    if not value:
        raise ValueError(f"{_argument(owner, 'policies', value)}: give at least one policy")
    for policy in value:
        if isinstance(policy, type) or not isinstance(policy, protocol):
            raise TypeError(
                f"{_argument(owner, 'policies', policy)}: expected a policy of ckptcore.policies (an instance, not its "
                f"class), or an object with the members of {protocol.__name__}"
            )


def _argument(owner: object, name: str, value: object) -> str:
    return f"{type(owner).__name__}({name}={repr(value)[:200]})"
