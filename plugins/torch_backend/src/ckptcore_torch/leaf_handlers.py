"""The leaf handler for each type of tensor."""

from __future__ import annotations

import sys
from typing import Final

import torch

from ckptcore.protocols import LeafHandler
from ckptcore_torch.tensors import SubclassHandler, TensorHandler, is_sharded

__all__ = ["handler_of_type"]

_PLAIN: Final = TensorHandler()
_SUBCLASSES: Final = SubclassHandler()


def handler_of_type(leaf_type: type) -> LeafHandler | None:
    """The handler for tensors of a type; None for what is no tensor."""
    if leaf_type is torch.Tensor or leaf_type is torch.nn.Parameter:
        return _PLAIN
    if not issubclass(leaf_type, torch.Tensor):
        return None
    # Nobody has a distributed tensor who did not import its module, which is slow and missing in some builds of PyTorch.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and issubclass(leaf_type, distributed.DTensor):
        from ckptcore_torch.dtensors import DTensorHandler

        return DTensorHandler()
    if is_sharded(leaf_type):
        from ckptcore_torch.sharded_tensors import ShardedTensorHandler

        return ShardedTensorHandler()
    return _SUBCLASSES
