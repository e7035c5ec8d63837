"""Leaf handlers by type of tensor, and of dtypes and devices."""

from __future__ import annotations

import sys
from typing import Final

import torch

from ckptcore.protocols import LeafHandler
from ckptcore_torch.tensors import SubclassHandler, TensorHandler, is_sharded
from ckptcore_torch.values import value_handler_of_type

_PLAIN: Final = TensorHandler()
_SUBCLASSES: Final = SubclassHandler()


def leaf_handler_of_type(leaf_type: type) -> LeafHandler | None:
    """Return the handler for a type of tensor or value of PyTorch, or None for other types."""
    if leaf_type is torch.Tensor or leaf_type is torch.nn.Parameter:
        return _PLAIN
    if not issubclass(leaf_type, torch.Tensor):
        return value_handler_of_type(leaf_type)
    # Distributed tensors exist only if their module was imported. Importing it is slow, and some
    # builds of PyTorch lack it.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and issubclass(leaf_type, distributed.DTensor):
        from ckptcore_torch.dtensors import DTensorHandler

        return DTensorHandler()
    if is_sharded(leaf_type):
        from ckptcore_torch.sharded_tensors import ShardedTensorHandler

        return ShardedTensorHandler()
    return _SUBCLASSES
