"""vLLM: a model loader that serves checkpoints in any layout and on any storage, without an export.

vLLM finds it by the entry point ``vllm.general_plugins``: ``vllm serve DIRECTORY --load-format ckptcore``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from ckptcore_torch.collectives import GlooCollectives
from ckptcore_torch.store_coordinator import StoreCoordinator, store_of_job
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError
from ckptcore.redaction import redacted_location
from ckptcore.results import StoredTree
from ckptcore_integrations.stored_weights import StoredWeight, WeightReader, elements_of, refuse_missing, torch_dtype

__all__ = ["CheckpointLoader", "register"]

_OPTIONS: Final = ("batch_bytes", "checkpoint", "reads", "storage", "subtree")
_BATCH_BYTES: Final = 1 << 30

_numbers: Final = itertools.count()
"""Numbers of the loads of this process, which are equal in all workers that load together."""


class CheckpointLoader(BaseModelLoader):
    """Loads the weights of a model from a checkpoint.

    Weights are read in batches. The workers of a tensor-parallel group read for each other, so that the storage
    delivers each byte once. Exception: for models that are quantised during the load, each worker reads its boxes of a
    layer itself when the layer is quantised.

    Options in ``model_loader_extra_config``:

    ``checkpoint``
        A path or URL. Default: ``model``, the directory of the configuration and the tokenizer.
    ``subtree``
        The part of the tree with the weights, such as ``"model"``. Default: the whole tree.
    ``storage``
        Options of storages by scheme; see `ckptcore.Context`.
    ``reads``
        ``"broadcast"``, the default: workers read for each other. ``"all"``: each worker reads for itself, which is
        faster if all workers are on one host that has the checkpoint in its page cache.
    ``batch_bytes``
        Size of the arrays of a batch, in bytes. Default: 1 GiB. A worker needs memory for all arrays of a batch. With
        ``reads="all"`` it needs memory only for its own boxes. If a model collects all weights into a list before it
        copies any, all of them are one batch.

    The name of a weight is its path below the subtree, with dots between keys. It must be the name in files of
    Hugging Face. Values that are not arrays are not passed to the model.
    """

    def __init__(self, load_config: Any) -> None:
        """Read the options.

        Raises:
            TypeError: an option has another type.
            ValueError: an option is unknown.
        """
        super().__init__(load_config)
        options = load_config.model_loader_extra_config
        if not isinstance(options, Mapping) or not set(options) <= set(_OPTIONS):
            raise ValueError(f"model_loader_extra_config={options!r}: expected a dict with {', '.join(_OPTIONS)}")
        self._checkpoint: str | None = options.get("checkpoint")
        self._subtree: str | None = options.get("subtree")
        for name, value in (("checkpoint", self._checkpoint), ("subtree", self._subtree)):
            if not isinstance(value, str | None):
                raise TypeError(f"model_loader_extra_config: {name}={value!r} is not text")
        self._together = options.get("reads", "broadcast")
        if self._together not in ("all", "broadcast"):
            raise ValueError(f"model_loader_extra_config: reads={self._together!r}: expected 'all' or 'broadcast'")
        self._batch_bytes = options.get("batch_bytes", _BATCH_BYTES)
        if type(self._batch_bytes) is not int or self._batch_bytes < 1:
            raise ValueError(
                f"model_loader_extra_config: batch_bytes={self._batch_bytes!r}: expected a number of bytes"
            )
        # Without communication, because vLLM may load in some workers only.
        self._context = Context(storage=options.get("storage", {}), job=JobOptions(coordinator=SingleProcess()))

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint exists. Downloads nothing, because `load_weights` reads directly from the storage.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        ckptcore.metadata(self._location(model_config), context=self._context)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights by ``model.load_weights``, which receives names and tensors on the CPU.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged or was replaced, or the subtree does not exist.
            ValueError: the checkpoint lacks weights of the model. Not checked for models that are quantised, or that do
                not return the names that they have loaded.
        """
        location = self._location(model_config)
        digest = ckptcore.metadata(location, context=self._context).digest
        with ckptcore.open(location, context=self._context) as checkpoint:
            tree = checkpoint if self._subtree is None else checkpoint[self._subtree]
            if not isinstance(tree, StoredTree):
                raise TreeMismatchError(
                    f"{self._subtree!r} in {redacted_location(location)} is one leaf: expected a container of weights",
                    [f"{self._subtree} is a leaf"],
                )
            contexts = self._context, self._context_of_group()
            targets = () if _quantises_layers(model) else [*model.parameters(), *model.buffers()]
            reader = WeightReader(location, tree, contexts, targets=targets, batch_bytes=self._batch_bytes)
            with reader:
                loaded = model.load_weights(reader.weights(torch_dtype))
            reader.fill()
            _read_kept(model)
        if ckptcore.metadata(location, context=self._context).digest != digest:
            raise CorruptCheckpointError(
                f"{redacted_location(location)} was replaced while it was loaded: load it again", key=location
            )
        if model_config.quantization is None:
            refuse_missing(model, loaded, redacted_location(location))

    def _location(self, model_config: Any) -> str:
        location: str = self._checkpoint or model_config.model
        return location

    def _context_of_group(self) -> Context:
        """Return options for loads by all workers of the tensor-parallel group.

        Without a group, or with ``reads="all"``, return the options for loads by one worker.
        """
        if self._together == "all" or not parallel_state.model_parallel_is_initialized():
            return self._context
        group, job = parallel_state.get_tp_group(), store_of_job()
        if group.world_size == 1 or job is None:
            return self._context
        name = f"ckptcore.vllm/{','.join(map(str, group.ranks))}/{next(_numbers)}"
        store = dist.PrefixStore(name, job)  # type: ignore[attr-defined]  # exported only at run time
        coordinator = StoreCoordinator(store, group.rank_in_group, group.world_size)
        collectives = GlooCollectives(store, group.rank_in_group, group.world_size)
        options = JobOptions(reads="broadcast", coordinator=coordinator, collectives=collectives)
        return Context(storage=self._context.storage, job=options)


def register() -> None:
    """Register the load format ``ckptcore`` and the weight transfer ``ckptcore``.

    vLLM calls this in each of its processes, and maybe more than once in a process.
    """
    register_model_loader("ckptcore")(CheckpointLoader)
    if "ckptcore" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "ckptcore", "ckptcore_integrations.vllm_updates", "DirectoryTransferEngine"
        )


def _read_kept(model: Any) -> None:
    """Read stored weights that a model keeps as parameters or buffers, while the checkpoint is open."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, StoredWeight):
                module._parameters[name] = torch.nn.Parameter(elements_of(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = elements_of(buffer)


def _quantises_layers(model: Any) -> bool:
    """Return True if vLLM quantises each layer once its weights are copied, so that copies cannot be delayed."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return any(getattr(method, "uses_meta_device", False) for method in methods)
