"""Container handler of torch.Size, a tuple of ints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ckptcore.protocols import ContainerHandler, Flattened, Priority

__all__ = ["container_handler_of_type"]


class _SizeHandler(ContainerHandler):
    priority = Priority.EXACT

    def flatten(self, value: torch.Size) -> Flattened:
        return Flattened("tuple", range(len(value)), tuple(value), "torch.Size")

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return torch.Size(children)  # type: ignore[arg-type]  # raises an error for other types itself


_HANDLER: Final = _SizeHandler()


def container_handler_of_type(value_type: type) -> ContainerHandler | None:
    """Return the handler of torch.Size, or None for other types."""
    return _HANDLER if value_type is torch.Size else None
