"""Updates of the weights of vLLM: its workers read a version from local files, each the boxes of its own parameters.

vLLM finds it by the entry point ``vllm.general_plugins``, as the weight transfer ``ckptcore``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import TargetUndefinedError
from ckptcore_integrations.stored_weights import WeightReader, refuse_missing, torch_dtype

__all__ = ["DirectoryTransferEngine", "UpdateDirectory"]

_BATCH_BYTES: Final = 1 << 30

_ALONE: Final = Context(job=JobOptions(coordinator=SingleProcess()))
"""Options of loads without communication: each worker reads local files, which are in the page cache of its host."""


@dataclass
class UpdateDirectory(WeightTransferUpdateInfo):
    """Content of a request to ``/update_weights``.

    Attributes:
        directory: the directory of the version to install.
    """

    directory: str


class DirectoryTransferEngine(WeightTransferEngine):
    """The part of a worker that replaces its weights by those in a directory of safetensors files.

    vLLM loads the files as it loads a checkpoint: layer by layer, into the memory of the parameters, with the division
    and the quantisation of the worker. This also works with CUDA graphs. A worker reads only what it copies.

    An update that fails leaves the weights of the worker undefined, and every later update is refused.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateDirectory
    supports_draft_weight_update = False

    _is_undefined = False

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Refuse the update if an earlier one failed. Changes nothing.

        Raises:
            TargetUndefinedError
        """
        if self._is_undefined:
            raise TargetUndefinedError(
                "an update of weights failed in this worker, so that they are a mixture of two versions: restart vLLM"
            )

    def receive_weights(self, update_info: UpdateDirectory) -> None:
        """Replace all weights of this worker.

        Raises:
            CheckpointError: the files cannot be read.
            ValueError: they lack weights of the model, or the model refuses one.
        """
        directory = _absolute(update_info.directory)
        with ckptcore.open(directory, context=_ALONE) as tree:
            self._is_undefined = True
            # No targets: vLLM keeps the weights of a layer until it has all of them, and then copies them at once.
            with (
                WeightReader(directory, tree, (_ALONE, _ALONE), targets=(), batch_bytes=_BATCH_BYTES) as reader,
                torch.device(self.device),
            ):
                initialize_layerwise_reload(self.model)
                loaded = self.model.load_weights(reader.weights(torch_dtype))
                finalize_layerwise_reload(self.model, self.model_config)
                _process_tied(self.model)
        if self.model_config.quantization is None:
            refuse_missing(self.model, loaded, directory)
        self._is_undefined = False

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has replaced all weights."""

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Refuse: a trainer publishes. vLLM requires this method up to 0.27.

        Raises:
            NotImplementedError
        """
        raise NotImplementedError("a trainer publishes weights with ckptcore_versions.Publisher")


def _process_tied(model: torch.nn.Module) -> None:
    """Process the embeddings again that share their weight with an earlier layer, such as a tied ``lm_head``.

    vLLM's reload processes a weight only in the layer that loads it. On CPUs each layer has a packed copy of its
    weight, so that a tied layer would keep the elements before.
    """
    weights: set[int] = set()
    for layer in model.modules():
        weight, method = layer._parameters.get("weight"), getattr(layer, "quant_method", None)
        if weight is not None and id(weight) in weights and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
        weights.add(id(weight))


def _absolute(directory: str) -> str:
    """Return a path that is absolute, and so is the same for every worker.

    Raises:
        ValueError
    """
    if not isinstance(directory, str) or not os.path.isabs(directory):
        raise ValueError(f"directory={directory!r}: expected an absolute path, which is the same for every worker")
    return directory
