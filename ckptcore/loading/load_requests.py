"""Requests of a load: which of the stored leaves it loads, and how."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ckptcore.loading.matching_options import EXACT, Matching
from ckptcore.protocols import Transforms

if TYPE_CHECKING:
    from ckptcore.loading.matching_options import LoadReport
    from ckptcore.select import Selection

__all__ = [
    "AS_IT_IS",
    "LoadAs",
    "LoadRequest",
]


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """How a checkpoint is loaded. Behind the API it is handed from the call inwards as one thing.

    Attributes:
        select: which stored leaves are loaded; None: all.
        transforms: what is changed of the stored tree before it is matched.
        matching: which differences between what is asked for and what is stored are allowed.
        report: is told what the load did, when it is done; None: nobody asks.
    """

    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None

    def __post_init__(self) -> None:
        """Refuse what is no option; what is selected and transformed is looked at where it is used.

        Raises:
            TypeError: names the option and what it may be.
        """
        if not isinstance(self.matching, Matching):
            raise TypeError(f'matching={self.matching!r}: expected a ckptcore.Matching, such as Matching(cast="safe")')
        if self.report is not None:
            from ckptcore.loading.matching_options import LoadReport  # who asks for a report waits for it anyway

            if not isinstance(self.report, LoadReport):
                raise TypeError(f"report={self.report!r}: expected a ckptcore.LoadReport, which the load fills")


AS_IT_IS: Final = LoadRequest()
"""A load of all there is, exactly as it is asked for."""


@dataclass(frozen=True, slots=True)
class LoadAs(Generic[T]):
    """Says how one of several checkpointables is loaded: what `ckptcore.load` takes besides its location, under the name of this one.

    Attributes:
        like: what it is loaded like or into, as it would stand without the wrapper; None: as it was saved.
        select, transforms, matching, report: as for `ckptcore.load`, or for `ckptcore.load_into` where an object is restored in place. For
            trees only, not for the files of objects.
    """

    like: T
    _: KW_ONLY
    select: Selection | None = None
    transforms: Transforms = ()
    matching: Matching = EXACT
    report: LoadReport | None = None

    @property
    def request(self) -> LoadRequest:
        """The options, without what it is loaded like."""
        return LoadRequest(select=self.select, transforms=self.transforms, matching=self.matching, report=self.report)
