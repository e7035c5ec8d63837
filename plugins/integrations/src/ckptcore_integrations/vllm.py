"""vLLM: a model loader that serves checkpoints in any layout and on any storage, without an export.

vLLM finds it by the entry point ``vllm.general_plugins``: ``vllm serve DIRECTORY --load-format ckptcore``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import TreeMismatchError
from ckptcore.model.tree import Attribute, Key
from ckptcore.redaction import redacted_location
from ckptcore.results import StoredArray, StoredTree

__all__ = ["CheckpointLoader", "register"]

_OPTIONS = ("checkpoint", "subtree", "storage")


class CheckpointLoader(BaseModelLoader):
    """Loads the weights of a model from a checkpoint. Arrays are read and verified one at a time.

    Options in ``model_loader_extra_config``:

    ``checkpoint``
        A path or URL. Default: ``model``, the directory of the configuration and the tokenizer.
    ``subtree``
        The part of the tree with the weights, such as ``"model"``. Default: the whole tree.
    ``storage``
        Options of storages by scheme; see `ckptcore.Context`.

    The name of a weight is its path below the subtree, with dots between keys. It must be the name that files of
    Hugging Face have. Values that are not arrays are not passed to the model.
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
        # Each worker reads by itself: vLLM may load in some of them only.
        self._context = Context(storage=options.get("storage", {}), job=JobOptions(coordinator=SingleProcess()))

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint exists. Downloads nothing: `load_weights` reads the checkpoint where it is.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        ckptcore.metadata(self._location(model_config), context=self._context)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights by ``model.load_weights``, which receives names and tensors on the CPU.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or the subtree does not exist.
            ValueError: the checkpoint lacks weights of the model. Not checked for models that are quantised, or that do
                not return the names that they have loaded.
        """
        location = self._location(model_config)
        with ckptcore.open(location, context=self._context) as opened:
            tree = opened if self._subtree is None else opened[self._subtree]
            if not isinstance(tree, StoredTree):
                raise TreeMismatchError(
                    f"{self._subtree!r} in {redacted_location(location)} is one leaf: expected a container of weights",
                    [f"{self._subtree} is a leaf"],
                )
            loaded = model.load_weights(_tensors(tree, ""))
        if loaded is None or model_config.quantization is not None:
            return
        missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(
                f"{redacted_location(location)} lacks weights of the model: {', '.join(missing[:5])}{more}. Its names "
                "must be those of Hugging Face; if the weights are in a part of the tree, set 'subtree' in "
                "model_loader_extra_config"
            )

    def _location(self, model_config: Any) -> str:
        return self._checkpoint or model_config.model


def register() -> None:
    """Register the load format ``ckptcore``. vLLM calls this in each of its processes."""
    register_model_loader("ckptcore")(CheckpointLoader)


def _tensors(tree: StoredTree, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays below a container with their names. Each is read when it is its turn."""
    for key, stored in tree.items():
        name = f"{prefix}{_text(key)}"
        if isinstance(stored, StoredTree):
            yield from _tensors(stored, f"{name}.")
        elif isinstance(stored, StoredArray):
            yield name, _tensor(np.asarray(stored), name)


def _text(key: Key) -> str:
    return key.name if isinstance(key, Attribute) else str(key)


def _tensor(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """Return a tensor over the memory of an array."""
    dtype = array.dtype.name
    if dtype == "bfloat16" or dtype.startswith("float8_"):  # types of ml_dtypes, which PyTorch does not accept
        found = getattr(torch, dtype, None)
        if found is not None:
            return torch.from_numpy(array.view(f"u{array.itemsize}")).view(found)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ValueError(f"{name}: PyTorch has no dtype {dtype}") from error
