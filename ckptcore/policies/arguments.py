"""Arguments of policies, checked: whole numbers, seconds and collections of steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable


def whole_number(owner: object, name: str, value: object, at_least: int) -> int:
    """Return the value as an int; NumPy integers are accepted.

    Raises:
        ValueError: for a bool, a float, or a number below `at_least`.
    """
    try:
        # operator.index raises TypeError for anything else
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise ValueError(f"{_argument(owner, name, value)}: give a whole number of at least {at_least}")
    return number


def seconds(owner: object, name: str, value: object, at_least: float | None = None) -> float:
    """Return the value as a float of seconds.

    Args:
        at_least: the minimum; None: any number above 0.

    Raises:
        ValueError: for a bool, NaN, infinity, anything that is not a number, or a number below the minimum.
    """
    try:
        # float raises TypeError for anything else
        number = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except TypeError:
        number = math.nan
    if not math.isfinite(number) or (number <= 0 if at_least is None else number < at_least):
        bound = "above 0" if at_least is None else f"of at least {at_least:g}"
        hint = "; for a timedelta, pass its total_seconds()" if hasattr(value, "total_seconds") else ""
        raise ValueError(f"{_argument(owner, name, value)}: give a finite number of seconds {bound}{hint}")
    return number


def step_numbers(owner: object, name: str, value: object) -> frozenset[int]:
    """Return the value as a set of steps.

    Raises:
        TypeError: if it is not an iterable, or is text.
        ValueError: if a step is not a whole number of at least 0.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise TypeError(f"{_argument(owner, name, value)}: give a collection of steps, such as [100, 200]")
    return frozenset(whole_number(owner, name, step, at_least=0) for step in value)


def check_policies(owner: object, value: object, protocol: type) -> None:
    """Check that a value is a collection of policies.

    Args:
        protocol: the runtime-checkable protocol of each policy.

    Raises:
        TypeError: if an item is something else.
        ValueError: if the collection is empty.
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
