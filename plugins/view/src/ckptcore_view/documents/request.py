"""Requests: the checked parameters of a document, and detection of disconnected clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ckptcore.model import JSON
from ckptcore.redaction import redacted_location
from ckptcore_view.open_tree import OpenTree


def number_to_json(number: complex | bool | str | None) -> JSON:
    """Return a number for JSON: as text if JSON or JavaScript cannot represent it."""
    if isinstance(number, complex):
        return str(number)
    if isinstance(number, float):
        return number if math.isfinite(number) else str(number)
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) > 1 << 53:
        return str(number)
    return number


T = TypeVar("T")


class BadRequestError(ValueError):
    """A parameter of a document is missing or wrong."""


class CancelledError(Exception):
    """The client of the document has left."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of a document.

    Attributes:
        parameters: the values of the parameters as text, by name.
        is_cancelled: returns True if the client has left.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = _never

    def text(self, name: str) -> str:
        """Return a parameter; empty if it is missing."""
        return self.parameters.get(name, "")

    def number(self, name: str) -> int:
        """Return a parameter that is a natural number.

        Raises:
            BadRequestError: it is missing, or something else.
        """
        text = self.text(name)
        if not text.isdecimal() or not text.isascii() or len(text) > 12:
            raise BadRequestError(f"{name} is {text[:40]!r}: expected a number")
        return int(text)

    def array_of(self, opened: OpenTree) -> int:
        """Return the parameter ``leaf``, the number of an array of a tree.

        Raises:
            BadRequestError: it is not a number, or ``version`` is another version of the tree.
        """
        leaf = self.number("leaf")
        if self.text("version") not in ("", opened.version):
            raise BadRequestError(f"{redacted_location(opened.location)} was replaced meanwhile: load the page again")
        return leaf

    def check_wanted(self) -> None:
        """Raise CancelledError if the client has left."""
        if self.is_cancelled():
            raise CancelledError

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until the client has left; then raise CancelledError.

        Use it for every loop whose length depends on a file or a request.
        """
        for item in items:
            self.check_wanted()
            yield item
