"""Options of a storage: their names and types, checked, with an error that lists the right ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.model import JSON
from ckptcore_obstore.retrying import RetryPolicy
from ckptcore_obstore.services import Tuning

__all__ = ["Option", "check_options", "choice", "flag", "number", "text", "tuning_of", "tuning_options"]

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """An option.

    Attributes:
        meaning: in a few words.
        type: of its value.
        choices: the values it can have; empty for any.
        least: the least number; None where it is none.
        step: what a number is a multiple of.
    """

    meaning: str
    type: type
    choices: tuple[str, ...] = ()
    least: float | None = None
    step: int = 1

    def check(self, value: JSON) -> str | None:
        """What is wrong with a value; None if nothing is."""
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
    """An option that is a text."""
    return Option(meaning, str)


def flag(meaning: str) -> Option:
    """An option that is true or false."""
    return Option(meaning, bool)


def choice(meaning: str, *choices: str) -> Option:
    """An option that is one of some texts."""
    return Option(meaning, str, choices)


def number(meaning: str, least: float) -> Option:
    """An option that is a number of seconds."""
    return Option(meaning, float, (), least)


def _count(meaning: str, least: int, step: int = 1) -> Option:
    return Option(meaning, int, (), least, step)


def check_options(scheme: str, given: Mapping[str, JSON], options: Mapping[str, Option]) -> Mapping[str, Any]:
    """The options that were given, if they are known and of their types.

    Raises:
        ValueError: naming the wrong one, and all that there are. Values are not shown where they may be secret.
    """
    for name, value in given.items():
        option = options.get(name)
        if option is None:
            known = ";\n".join([f"  {name}: {option.meaning}" for name, option in sorted(options.items())])
            near = difflib.get_close_matches(name, options, 1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"Context(storage={{{scheme!r}: ...}}): there is no option {name!r}{meant} There are\n{known}"
            )
        if (wrong := option.check(value)) is not None:
            raise ValueError(f"Context(storage={{{scheme!r}: {{{name!r}: ...}}}}): {wrong} ({option.meaning})")
    return given


def tuning_options() -> Mapping[str, Option]:
    """The options that all object stores have."""
    return {
        "concurrency": _count("requests at once, at most", 1),
        "request_bytes": _count("bytes that one read asks for", 1),
        "part_bytes": _count("bytes that one part of an upload carries: whole MiB, at least 5", 5 * _MIB, _MIB),
        "gap_bytes": _count("bytes between two ranges up to which one request reads both", 0),
        "retries": _count("tries of a request after the first one", 0),
        "first_wait": number(
            "seconds that are waited before the second try, at most; twice as long before each after it", 0
        ),
        "deadline": number("seconds after which a request is not tried again", 0),
        "timeout": number("seconds without a byte from the service, after which a request is tried again", 0.001),
        "connect_timeout": number("seconds for a connection, and for the service to take each MiB", 0.001),
        "ca_bundle": text("a file of certificates to trust"),
    }


def tuning_of(given: Mapping[str, Any], *, ca_bundle: str | None = None) -> Tuning:
    """How requests are made, by options that were checked.

    Args:
        given: the options.
        ca_bundle: certificates to trust where the options name none.
    """
    default = Tuning()
    retries = RetryPolicy(
        retries=given.get("retries", default.retries.retries),
        deadline_seconds=given.get("deadline", default.retries.deadline_seconds),
        first_wait_seconds=given.get("first_wait", default.retries.first_wait_seconds),
    )
    return Tuning(
        concurrency=given.get("concurrency", default.concurrency),
        request_bytes=given.get("request_bytes", default.request_bytes),
        part_bytes=given.get("part_bytes", default.part_bytes),
        gap_bytes=given.get("gap_bytes", default.gap_bytes),
        timeout_seconds=given.get("timeout", default.timeout_seconds),
        connect_timeout_seconds=given.get("connect_timeout", default.connect_timeout_seconds),
        retries=retries,
        ca_bundle=given.get("ca_bundle", ca_bundle),
    )
