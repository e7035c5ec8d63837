"""Preservation policies as text, for command lines: ``latest_n=3,best_n=2:loss:min``.

Commas separate policies, and a step is kept if any of them keeps it. Colons separate the arguments of one policy.

=======================================  ===================================================================
``preserve_all``                         `PreserveAll`
``latest_n=3``                           `LatestN`
``latest_duration=12h``                  `LatestDuration`; seconds, or a number with the unit s, m, h or d
``every_n_seconds=1h``                   `EveryNSeconds`; likewise
``every_n_steps=1000``                   `EveryNSteps`
``every_n_steps_closest=1000``           `EveryNStepsClosest`
``custom_steps=100:200``                 `CustomSteps`
``best_n=2:loss:min``                    `BestN`, which keeps steps without the metric
``best_n=2:loss:min:drop_unmeasured``    `BestN` with ``keep_unmeasured=False``
=======================================  ===================================================================

In the name of a metric, ``%2C`` is a comma, ``%3A`` a colon, ``%20`` a space and ``%25`` a percent sign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, cast

from ckptcore.policies.preservation import (
    AnyPreservation,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationPolicy,
    PreserveAll,
)

__all__ = ["format_preservation", "parse_preservation"]

_DROP_UNMEASURED: Final = "drop_unmeasured"
_SECONDS_OF_UNIT: Final[Mapping[str, int]] = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_WHOLE_NUMBER: Final = re.compile(r"[0-9]{1,100}")
_DURATION: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)(?P<unit>[smhd]?)")
_TO_ESCAPE: Final = re.compile("[%,: ]")
_ESCAPED: Final = re.compile("%(25|2C|3A|20)", re.IGNORECASE)


def parse_preservation(text: str) -> PreservationPolicy:
    """Parse the text of a policy.

    Raises:
        ValueError: if the text is not a policy; the error lists all policies.
    """
    policies = [_parse_one(part.strip(" "), text) for part in text.split(",")]
    return policies[0] if len(policies) == 1 else AnyPreservation(policies)


def format_preservation(policy: PreservationPolicy) -> str:
    """Return the text of a policy. `parse_preservation` returns a policy that keeps the same steps.

    Nested `AnyPreservation` policies are flattened.

    Raises:
        ValueError: if the policy is not one of `ckptcore.policies`, or is a `CustomPreservation`.
    """
    return ",".join(_format_each(policy))


def _format_each(policy: PreservationPolicy) -> Iterator[str]:
    match policy:
        case AnyPreservation(policies):
            for part in policies:
                yield from _format_each(part)
        case PreserveAll():
            yield "preserve_all"
        case LatestN(n):
            yield f"latest_n={n}"
        case LatestDuration(seconds):
            yield f"latest_duration={_format_seconds(seconds)}"
        case EveryNSeconds(seconds):
            yield f"every_n_seconds={_format_seconds(seconds)}"
        case EveryNSteps(steps):
            yield f"every_n_steps={steps}"
        case EveryNStepsClosest(steps):
            yield f"every_n_steps_closest={steps}"
        case CustomSteps(steps):
            yield "custom_steps=" + ":".join(map(str, sorted(steps)))
        case BestN(n, metric, mode):
            escaped = _TO_ESCAPE.sub(lambda match: f"%{ord(match[0]):02X}", metric)
            yield f"best_n={n}:{escaped}:{mode}" + ("" if policy.keep_unmeasured else f":{_DROP_UNMEASURED}")
        case _:
            raise ValueError(f"{policy!r} has no text; the policies that have one are {', '.join(_FORMS.values())}")


def _parse_one(part: str, text: str) -> PreservationPolicy:
    name, equals, value = part.partition("=")
    try:
        if name not in _PARSERS:
            raise ValueError(f"{name[:80]!r} is not a preservation policy" if name else "a policy is missing")
        if bool(equals) != ("=" in _FORMS[name]):
            raise ValueError(f"expected {_FORMS[name]}")
        return _PARSERS[name](value.split(":"))
    except ValueError as error:
        raise ValueError(
            f"preservation policy {text[:200]!r}, at {part[:200]!r}: {error}. Policies: {', '.join(_FORMS.values())}; "
            "commas separate policies, and a step is kept if any of them keeps it"
        ) from error


def _parse_all(_: list[str]) -> PreservationPolicy:
    return PreserveAll()


def _parse_best_n(values: list[str]) -> PreservationPolicy:
    keep_unmeasured = values[3:] != [_DROP_UNMEASURED]
    if len(values) != (3 if keep_unmeasured else 4):
        raise ValueError(f"expected n:metric:min or n:metric:max, with or without :{_DROP_UNMEASURED}")
    n, metric, mode = values[:3]
    name = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), metric)
    # BestN checks the mode.
    return BestN(_whole_number(n), name, cast(Literal["min", "max"], mode), keep_unmeasured=keep_unmeasured)


def _one_number(policy: Callable[[int], PreservationPolicy]) -> Callable[[list[str]], PreservationPolicy]:
    return lambda values: policy(_whole_number(":".join(values)))


def _one_duration(policy: Callable[[float], PreservationPolicy]) -> Callable[[list[str]], PreservationPolicy]:
    return lambda values: policy(_seconds(":".join(values)))


def _whole_number(text: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise ValueError(f"expected a whole number, got {text[:80]!r}")
    return int(text)


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if not match:
        raise ValueError(f"expected seconds, or a number with the unit s, m, h or d, got {text[:80]!r}")
    return float(match["number"]) * _SECONDS_OF_UNIT[match["unit"]]


def _format_seconds(seconds: float) -> str:
    return repr(seconds).removesuffix(".0")


_PARSERS: Final[Mapping[str, Callable[[list[str]], PreservationPolicy]]] = {
    "preserve_all": _parse_all,
    "latest_n": _one_number(LatestN),
    "latest_duration": _one_duration(LatestDuration),
    "every_n_seconds": _one_duration(EveryNSeconds),
    "every_n_steps": _one_number(EveryNSteps),
    "every_n_steps_closest": _one_number(EveryNStepsClosest),
    "custom_steps": lambda values: CustomSteps([_whole_number(value) for value in values]),
    "best_n": _parse_best_n,
}

_FORMS: Final[Mapping[str, str]] = {
    "preserve_all": "preserve_all",
    "latest_n": "latest_n=3",
    "latest_duration": "latest_duration=12h",
    "every_n_seconds": "every_n_seconds=1h",
    "every_n_steps": "every_n_steps=1000",
    "every_n_steps_closest": "every_n_steps_closest=1000",
    "custom_steps": "custom_steps=100:200",
    "best_n": "best_n=2:loss:min",
}
