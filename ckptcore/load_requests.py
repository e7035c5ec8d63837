"""What a user asks of a load, besides where it is and like what it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptcore.matching_options import EXACT, Matching

if TYPE_CHECKING:
    from ckptcore.load_reports import LoadReport
    from ckptcore.select import Selection
    from ckptcore.transforms import Transforms

__all__ = ["AS_IT_IS", "LoadRequest"]


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


AS_IT_IS: Final = LoadRequest()
"""A load of all there is, exactly as it is asked for."""
