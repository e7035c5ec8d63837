"""Validation of storage options. Errors list the valid options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.model import JSON
from ckptcore_obstore.retrying import RetryPolicy
from ckptcore_obstore.services import Tuning

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """A storage option.

    Attributes:
        meaning: short description.
        type: type of the value.
        choices: valid values; empty for any.
        least: smallest valid number; None for no limit.
        step: required divisor of an integer.
    """

    meaning: str
    type: type
    choices: tuple[str, ...] = ()
    least: float | None = None
    step: int = 1

    def check(self, value: JSON) -> str | None:
        """Return the problem of a value as text, or None if the value is valid."""
        fits = isinstance(value, self.type) and not (isinstance(value, bool) and self.type is not bool)
        if self.type is float:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits:
            return f"expected {self.type.__name__}, found {type(value).__name__}"
        if self.type is int and self.step > 1 and isinstance(value, int) and value % self.step:
            return f"expected a multiple of {self.step}, found {value}"
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(map(repr, self.choices))}, found {value!r}"
        if self.least is not None and isinstance(value, int | float) and not value >= self.least:
            return f"expected at least {self.least:g}, found {value!r}"
        return None


def text(meaning: str) -> Option:
    """A string option."""
    return Option(meaning, str)


def flag(meaning: str) -> Option:
    """A boolean option."""
    return Option(meaning, bool)


def choice(meaning: str, *choices: str) -> Option:
    """A string option with fixed choices."""
    return Option(meaning, str, choices)


def number(meaning: str, least: float) -> Option:
    """A numeric option, such as a time in seconds, with a minimum."""
    return Option(meaning, float, (), least)


def _count(meaning: str, least: int, step: int = 1) -> Option:
    return Option(meaning, int, (), least, step)


def check_options(scheme: str, given: Mapping[str, JSON], options: Mapping[str, Option]) -> Mapping[str, Any]:
    """Check the names and values of options. Return the options.

    Raises:
        ValueError: for an unknown or invalid option. Values of text options are not shown, because
            they can be secrets.
    """
    for name, value in given.items():
        option = options.get(name)
        if option is None:
            known = ";\n".join([f"  {name}: {option.meaning}" for name, option in sorted(options.items())])
            near = difflib.get_close_matches(name, options, 1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"Context(storage={{{scheme!r}: ...}}): unknown option {name!r}{meant} Options:\n{known}")
        if (wrong := option.check(value)) is not None:
            raise ValueError(f"Context(storage={{{scheme!r}: {{{name!r}: ...}}}}): {wrong} ({option.meaning})")
    return given


def tuning_options() -> Mapping[str, Option]:
    """Options of all object stores."""
    return {
        "concurrency": _count("maximum number of concurrent requests", 1),
        "request_bytes": _count("bytes of one read request", 1),
        "part_bytes": _count("bytes of one part of an upload: whole MiB, at least 5", 5 * _MIB, _MIB),
        "gap_bytes": _count("largest gap between two ranges that one request reads", 0),
        "retries": _count("number of retries of a request", 0),
        "first_wait": number("maximum wait in seconds before the first retry; doubled for each further one", 0),
        "deadline": number("seconds after which a request is not retried", 0),
        "timeout": number("seconds without data from the service after which a request is retried", 0.001),
        "connect_timeout": number("seconds to connect, and to send each MiB", 0.001),
        "ca_bundle": text("file of trusted certificates"),
    }


def tuning_of(given: Mapping[str, Any]) -> Tuning:
    """Return the tuning for validated options."""
    default = Tuning()
    retries = RetryPolicy(
        retries=given.get("retries", default.retries.retries),
        deadline_seconds=given.get("deadline", default.retries.deadline_seconds),
        initial_wait_seconds=given.get("first_wait", default.retries.initial_wait_seconds),
    )
    return Tuning(
        concurrency=given.get("concurrency", default.concurrency),
        request_bytes=given.get("request_bytes", default.request_bytes),
        part_bytes=given.get("part_bytes", default.part_bytes),
        gap_bytes=given.get("gap_bytes", default.gap_bytes),
        timeout_seconds=given.get("timeout", default.timeout_seconds),
        connect_timeout_seconds=given.get("connect_timeout", default.connect_timeout_seconds),
        retries=retries,
        ca_bundle=given.get("ca_bundle") or None,
    )
