"""PyTorch for ckptcore: the hooks. Importing this imports no PyTorch; the modules that do are imported on first use.

::

    dtypes             every torch dtype and how it is carried as a NumPy one, or why not
    conversions        from tensors to NumPy arrays over the same memory and back, casts
    tensors            leaf handlers: plain tensors and Parameters; subclasses of them
    dtensors           the leaf handler of DTensors; placements says where their elements are
    sharded_tensors    the leaf handler of ShardedTensors
    transfers          from device memory to host memory through pinned staging buffers
    stateful           checkpointables: schedulers, gradient scalers, data loaders, random generators; handlers by type.
                       data_loaders checks whether the state of a torchdata loader has the order of its sampler
    modules            the checkpointable handler of modules, under the names of the plain one, which names finds
    optimizers         the checkpointable handler of optimizers, by the numbers of their parameters
    named_optimizers   NamedOptimizer: optimizers by the names of parameters, and NamedOptimizerPart, of those that one process has;
                       optimizer_names finds the names in one optimizer, fsdp_optimizers under FSDP1; stored_groups and
                       flattened_states know the forms in which groups are stored
    abstracts          abstract tensors for what is stored
    sizes              the container torch.Size
    store_coordinator  the coordinator of a torch.distributed job: store_meetings keeps former lives of the job apart, watched_stores
                       ends what a store does not answer
    collectives        how processes of such a job send each other what one has read, over group_channels
    adapters           LoRA adapters as PEFT keeps them, saved and loaded by name
    testing            the sample for the matrix of ckptcore_testing
"""

from __future__ import annotations

import sys

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import CheckpointableHandler, Collectives, ContainerHandler, Coordinator, LeafHandler

__all__ = [
    "ckpt_checkpointable_handler",
    "ckpt_collectives",
    "ckpt_container_handler",
    "ckpt_coordinator",
    "ckpt_leaf_handler",
]


def _is_torch_imported() -> bool:
    # The class is looked for, too: the module is there, and empty, while another thread still imports it.
    return hasattr(sys.modules.get("torch"), "Tensor")


@hookimpl
def ckpt_leaf_handler(leaf_type: type) -> LeafHandler | None:
    """The handler of tensors."""
    if not _is_torch_imported():
        return None
    from ckptcore_torch.leaf_handlers import handler_of_type

    return handler_of_type(leaf_type)


@hookimpl
def ckpt_container_handler(value_type: type) -> ContainerHandler | None:
    """The handler of torch.Size."""
    if not _is_torch_imported():
        return None
    from ckptcore_torch.sizes import handler_of_type

    return handler_of_type(value_type)


@hookimpl
def ckpt_checkpointable_handler(value_type: type) -> CheckpointableHandler | None:
    """The handler of modules, optimizers and what else has a state dict in PyTorch."""
    if not _is_torch_imported():
        return None
    from ckptcore_torch.stateful import handler_of_type

    return handler_of_type(value_type)


@hookimpl
def ckpt_coordinator() -> Coordinator | None:
    """The coordinator of the job whose process group was initialized, if it has several processes."""
    # The function is looked for, too: a torch that was built without torch.distributed has the module without it.
    if not hasattr(sys.modules.get("torch.distributed"), "init_process_group"):
        return None
    from ckptcore_torch.store_coordinator import coordinator_of_job

    return coordinator_of_job()


@hookimpl
def ckpt_collectives() -> Collectives | None:
    """Process groups of their own between the processes of the job whose process group was initialized, if it has several."""
    if not hasattr(sys.modules.get("torch.distributed"), "init_process_group"):
        return None
    from ckptcore_torch.collectives import collectives_of_job

    return collectives_of_job()
