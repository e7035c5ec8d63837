"""The PyTorch plugin: the hooks. Importing it does not import PyTorch.

::

    conversions        dtypes, tensors as NumPy arrays over the same memory, and casts
    leaf_handlers      handlers by type: of tensors, of values such as dtypes and devices, and of containers
    tensors            leaf handlers of plain tensors, Parameters and their subclasses
    tensor_parts       handler of subclasses that are composed of tensors. stored_parts describes the composed
                       tensor, and sharded_parts divides the parts of DTensors
    sparse_tensors     handlers of sparse and quantized tensors
    dtensors           leaf handler of DTensors; placements computes their boxes
    sharded_tensors    leaf handler of ShardedTensors
    transfers          copies between device and host through pinned staging buffers
    stateful           handlers of schedulers, gradient scalers, data loaders and random generators
    modules            checkpointable handler of modules; names removes wrappers from their names
    copies             copies of modules and optimizers, to restore them if a load fails early
    optimizers         checkpointable handler of optimizers, by the numbers of their parameters.
                       optimizer_objects handles objects in their states, and optimizer_classes detects
                       states of another class
    zero_optimizers    checkpointable handler of ZeroRedundancyOptimizer
    named_optimizers   NamedOptimizer: optimizers by names of parameters, and NamedOptimizerPart for
                       the parameters of one process. optimizer_names names the state of an
                       optimizer, fsdp_optimizers does so under FSDP1, and optimizer_forms converts
                       between the stored forms
    abstracts          abstract tensors for stored arrays
    store_coordinator  coordinator of a torch.distributed job; store_handshakes separates restarts of
                       the job, and adds timeouts to the store
    collectives        sends bytes between processes of such a job
    adapters           saves and loads LoRA and other adapters in the format of PEFT. adapter_names parses
                       names of LoRA, and peft_models handles models that PEFT created
    testing            sample for the matrix of ckptcore_testing
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ckptcore.hookspecs import hookimpl
from ckptcore.model import ArrayRecord
from ckptcore.protocols import (
    AbstractLeaves,
    CheckpointableHandler,
    Collectives,
    ContainerHandler,
    Coordinator,
    LeafHandler,
)

__all__ = [
    "ckpt_checkpointable_handler",
    "ckpt_collectives",
    "ckpt_container_handler",
    "ckpt_coordinator",
    "ckpt_frameworks",
    "ckpt_leaf_handler",
]


def _is_torch_imported() -> bool:
    # Check for the class too: while another thread imports torch, the module is incomplete.
    return hasattr(sys.modules.get("torch"), "Tensor")


@hookimpl
def ckpt_leaf_handler(leaf_type: type) -> LeafHandler | None:
    """Return the leaf handler of tensors, dtypes and devices."""
    if not _is_torch_imported():
        return None
    from ckptcore_torch.leaf_handlers import leaf_handler_of_type

    return leaf_handler_of_type(leaf_type)


@hookimpl
def ckpt_container_handler(value_type: type) -> ContainerHandler | None:
    """Return the container handler of torch.Size, and of objects in the states of optimizers."""
    if not _is_torch_imported():
        return None
    from ckptcore_torch.leaf_handlers import container_handler_of_type

    return container_handler_of_type(value_type)


@hookimpl
def ckpt_checkpointable_handler(value_type: type) -> CheckpointableHandler | None:
    """Return the handler of modules, optimizers and other PyTorch objects with a state dict."""
    if not _is_torch_imported():
        return None
    from ckptcore_torch.stateful import checkpointable_handler_of_type

    return checkpointable_handler_of_type(value_type)


@hookimpl
def ckpt_frameworks() -> Mapping[str, AbstractLeaves]:
    """Return PyTorch, which is imported when it is used."""
    return {"torch": _abstract_leaves}


def _abstract_leaves(stored: Sequence[ArrayRecord]) -> Sequence[object]:
    from ckptcore_torch.abstracts import abstract_leaves

    return abstract_leaves(stored)


@hookimpl
def ckpt_coordinator() -> Coordinator | None:
    """Return the coordinator of the initialized process group, if it has several processes."""
    # Check for the function too: without torch.distributed in the build, the module exists but
    # lacks it.
    if not hasattr(sys.modules.get("torch.distributed"), "init_process_group"):
        return None
    from ckptcore_torch.store_coordinator import coordinator_of_job

    return coordinator_of_job()


@hookimpl
def ckpt_collectives() -> Collectives | None:
    """Return collectives over separate process groups, if the initialized process group has several processes."""
    if not hasattr(sys.modules.get("torch.distributed"), "init_process_group"):
        return None
    from ckptcore_torch.collectives import collectives_of_job

    return collectives_of_job()
