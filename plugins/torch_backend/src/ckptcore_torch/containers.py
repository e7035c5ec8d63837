"""Container handlers: `torch.Size`, a tuple of ints, and objects in the states of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ckptcore.protocols import ContainerHandler, Flattened, Priority
from ckptcore_torch.optimizer_objects import OptimizerObject, OptimizerObjectHandler


class _SizeHandler(ContainerHandler):
    priority = Priority.EXACT

    def flatten(self, value: torch.Size) -> Flattened:
        return Flattened("tuple", range(len(value)), tuple(value), "torch.Size")

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return torch.Size(children)  # type: ignore[arg-type]  # raises an error for other types itself


_SIZES: Final = _SizeHandler()
_OBJECTS: Final = OptimizerObjectHandler()


def container_handler_of_type(value_type: type) -> ContainerHandler | None:
    """Return the handler for a type, or None for types that are not PyTorch's."""
    if value_type is torch.Size:
        return _SIZES
    return _OBJECTS if value_type is OptimizerObject else None
