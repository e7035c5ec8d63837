"""LoRA adapters as PEFT keeps them: a directory with ``adapter_model.safetensors`` and ``adapter_config.json``.

PEFT loads what is saved here (``PeftModel.from_pretrained``), and what it saved (``save_pretrained``) is loaded; of either file the
bytes of elements and the JSON are the same. A save is one of ckptcore's: atomic, with checksums, of both files. The names and
the config follow peft 0.21.2. PEFT itself is not needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import torch

import ckptcore
from ckptcore.errors import (
    AtomicityError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    TreeMismatchError,
)
from ckptcore.model import JSON
from ckptcore.protocols import About, Snapshot, WriteStore
from ckptcore_torch.adapter_configs import AdapterConfig, SupportsToDict, config_json, stored_config
from ckptcore_torch.adapter_names import AdapterNames, Biases, check_stored_name, names_of_adapter, plain_name

__all__ = ["Adapter", "AdapterLayout", "adapter_state", "load_adapter", "load_adapter_into", "save_adapter"]

_CONFIG_FILE: Final = "adapter_config.json"
_CONFIG: Final = "adapter_config"
"""The name of the config in the metadata of a checkpoint: that of a directory of PEFT has it there as well."""
_ATTEMPTS: Final = 20

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was loaded.

    Attributes:
        arrays: NumPy arrays by the names that PEFT writes.
        config: what its ``adapter_config.json`` says.
    """

    arrays: Mapping[str, Any]
    config: AdapterConfig


@dataclass(frozen=True, slots=True)
class AdapterLayout(ckptcore.SafetensorsLayout):
    """The layout safetensors in the one file that PEFT looks for, and the config beside it.

    Attributes:
        max_file_bytes: no bound: PEFT reads one file.
        stem: of the name of the file.
        config: what goes into ``adapter_config.json``. Who saves with this layout otherwise than by `save_adapter` gives it as
            ``metadata={"adapter_config": config}`` as well, for `load_adapter`.

    Raises:
        ValueError, TypeError: for what is no config.
    """

    max_file_bytes: int = sys.maxsize
    stem: str = "adapter_model"
    config: AdapterConfig = field(kw_only=True, hash=False)

    def __post_init__(self) -> None:
        ckptcore.SafetensorsLayout.__post_init__(self)  # a class with slots is made anew: super() would not know it
        object.__setattr__(self, "config", config_json(self.config))

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the one file; PEFT knows no slices.

        Raises:
            AtomicityError: if this process holds a part of the adapter only.
        """
        plan = snapshot.plan
        arrays = sum(len(leaves) for leaves in self.arrays_by_object(plan.tree))
        for item in plan.items:
            if sum(box.size for box in item.boxes) != item.spec.size or len(plan.items) != arrays:
                raise AtomicityError(
                    f"process {plan.rank} holds a part of the adapter only, and PEFT reads it out of one file; gather it first, as "
                    "DTensor.full_tensor does, in every process"
                )
        return ckptcore.SafetensorsLayout.write(self, snapshot, store)

    def mark(self, about: About, store: WriteStore) -> None:
        """Write the config.

        Raises:
            CompositeCheckpointError: for a checkpoint of several checkpointables: its config would stand beside the wrong directory.
        """
        if about.members:
            raise CompositeCheckpointError(
                f"an adapter is one tree, and {', '.join(about.members)} were to be saved together: save each by itself, at a location of "
                "its own. Nothing was committed",
                list(about.members),
            )
        store.put(_CONFIG_FILE, json.dumps(self.config, indent=2, sort_keys=True).encode())


def adapter_state(
    model: torch.nn.Module, adapter_name: str = "default", *, biases: Biases | None = None
) -> dict[str, torch.Tensor]:
    """What belongs to an adapter in a model, by the names that PEFT writes: its LoRA matrices, magnitudes, trained modules.

    The tensors are the model's own, not copies. The model need not be one of PEFT; what has no adapter name belongs to each. The
    base model is left out: of embeddings that were resized, which PEFT saves in whole, add the entries yourself.

    Args:
        model: the model; also compiled, or in DistributedDataParallel.
        adapter_name: which adapter.
        biases: which biases of the base model belong to it; None: as a model of PEFT says, else none.

    Raises:
        TreeMismatchError: if there is no such adapter, or matrices that have no module of their own are the other way round.
        NameCollisionError: if PEFT would have one name for two parameters.
    """
    model = _unwrapped(model)
    own = model.state_dict()
    return _state(own, _names(model, own, adapter_name, biases))


def save_adapter(
    location: str | os.PathLike[str],
    model_or_state: torch.nn.Module | Mapping[str, Any],
    config: AdapterConfig | SupportsToDict | None = None,
    *,
    adapter_name: str = "default",
    overwrite: bool | Literal["non-atomic"] = False,
    metadata: Mapping[str, JSON] | None = None,
    context: ckptcore.Context | None = None,
) -> None:
    """Save an adapter and return once it is committed.

    Args:
        location: a path or URL; a directory is made there.
        model_or_state: the model, of which the adapter is taken; or arrays of any framework by the names that PEFT writes.
        config: what PEFT is to make of it, as its config or as JSON; None: as the model of PEFT has it.
        adapter_name: which adapter of the model.
        overwrite, metadata, context: as for `ckptcore.save`; the metadata gets the config as ``adapter_config``.

    Raises:
        ValueError, TypeError: for what is no config, no array, or no metadata; nothing was written.
        TreeMismatchError: for names that PEFT would not look for, or if there is no such adapter; nothing was written.
        AtomicityError: if this process holds a part of an array only: gather it first, as `DTensor.full_tensor` does, in every process.
        What `ckptcore.save` does.
    """
    if isinstance(model_or_state, torch.nn.Module):
        model = _unwrapped(model_or_state)
        fields = config_json(_config_of(model, adapter_name) if config is None else config)
        own = model.state_dict()
        biases: Any = fields.get("bias", "none")  # one of `Biases` in a config of LoRA
        state: Mapping[str, Any] = _state(own, _names(model, own, adapter_name, biases))
    elif config is None:
        raise TypeError("config=None: arrays say nothing of it; pass what is to stand in adapter_config.json")
    else:
        fields = config_json(config)
        state = _checked_state(model_or_state, is_lora=fields["peft_type"] == "LORA")
    if metadata is not None and _CONFIG in metadata:
        raise ValueError(
            f"metadata= has {_CONFIG!r}, which is the config's own; choose another name. Nothing was written"
        )
    ckptcore.save(
        location,
        state,
        layout=AdapterLayout(config=fields),
        overwrite=overwrite,
        metadata={**(metadata or {}), _CONFIG: fields},
        context=context,
    )


def load_adapter(location: str | os.PathLike[str], *, context: ckptcore.Context | None = None) -> Adapter:
    """Load an adapter that `save_adapter` or PEFT saved.

    Raises:
        CheckpointNotFoundError: if there is none; also if its config is not there.
        CorruptCheckpointError: if its arrays or its config cannot be read.
    """

    def load(source: str, found: ckptcore.CheckpointMetadata, config: AdapterConfig) -> Adapter:
        return Adapter(ckptcore.load(source, context=context), config)

    return _while_unchanged(location, context, load)


def load_adapter_into(
    location: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    adapter_name: str = "default",
    context: ckptcore.Context | None = None,
) -> AdapterConfig:
    """Load an adapter into a model that has one of its shape already; returns its config.

    Parameters keep their memory; only those on the meta device are replaced. Entries of the base model that were saved with it
    (biases, embeddings) go where they are in the model.

    Args:
        location: where `save_adapter` or PEFT saved it.
        model: the model; it need not be one of PEFT.
        adapter_name: which adapter of the model is filled; it may have had another name when it was saved.
        context: options.

    Raises:
        TreeMismatchError: if the adapter in the model has other parameters, shapes or dtypes; lists every difference; nothing was changed.
        TargetUndefinedError: if it fails half-way; the model then holds a mix.
        What `load_adapter` does.
    """
    model = _unwrapped(model)

    def load(source: str, found: ckptcore.CheckpointMetadata, config: AdapterConfig) -> AdapterConfig:
        own = model.state_dict()
        names = dict(_names(model, own, adapter_name, "none").by_stored)
        plain = {plain_name(name): name for name in own}
        for stored in found.abstract if isinstance(found.abstract, Mapping) else ():
            if stored not in names and stored in plain:
                names[stored] = plain[stored]
        target = {stored: own[name] for stored, name in names.items()}
        ckptcore.load_into(source, target, context=context)
        lacking = {name: target[stored] for stored, name in names.items() if own[name].is_meta}
        if lacking:
            model.load_state_dict(lacking, strict=False, assign=True)
        return config

    return _while_unchanged(location, context, load)


def _while_unchanged(
    location: str | os.PathLike[str],
    context: ckptcore.Context | None,
    load: Callable[[str, ckptcore.CheckpointMetadata, AdapterConfig], Loaded],
) -> Loaded:
    """What `load` makes of an adapter whose arrays and config are of one save; again if it was replaced meanwhile."""
    for _ in range(_ATTEMPTS):
        source, found = _found(os.fspath(location), context)
        loaded = load(source, found, _stored_config(found, location))
        if ckptcore.metadata(source, context=context).save_id == found.save_id:
            return loaded
    raise CorruptCheckpointError(
        f"{location} was replaced {_ATTEMPTS} times while it was read; load it when it is saved less often"
    )


def _found(location: str, context: ckptcore.Context | None) -> tuple[str, ckptcore.CheckpointMetadata]:
    """Where the adapter is, and what its checkpoint says: in a directory with the model that it is of, it is named by its file."""
    found = ckptcore.metadata(location, context=context)
    if _CONFIG not in found.custom:
        file = f"{location.rstrip('/')}/adapter_model.safetensors"
        try:
            return file, ckptcore.metadata(file, context=context)
        except CheckpointNotFoundError:
            return location, found
    return location, found


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module in what only distributes it: its names are those that other programs know."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def _names(
    model: torch.nn.Module, own: Mapping[str, torch.Tensor], adapter_name: str, biases: Biases | None
) -> AdapterNames:
    held: Any = _peft_config(model, adapter_name)
    chosen: Biases = getattr(held, "bias", "none") if biases is None else biases
    # A token adapter that is tied to another has the name of its own as well; PEFT stores it under the first.
    first: dict[tuple[object, ...], str] = {}
    kept = [
        name
        for name, tensor in own.items()
        if "trainable_tokens_delta" not in name
        or tensor.is_meta
        or first.setdefault((tensor.data_ptr(), tensor.shape), name) == name
    ]
    return names_of_adapter(kept, adapter_name, chosen)


def _state(own: Mapping[str, torch.Tensor], names: AdapterNames) -> dict[str, torch.Tensor]:
    state = {stored: own[name] for stored, name in names.by_stored.items()}
    for stored in names.bare:
        other = stored.replace(".lora_A.", ".lora_B.")
        if stored == other or other not in state:
            continue
        rank, expected = state[stored].shape[:1], state[other].shape[1:2]
        if rank != expected:
            raise TreeMismatchError(
                f"{names.by_stored[stored]!r} has the shape {tuple(state[stored].shape)} and {names.by_stored[other]!r} "
                f"{tuple(state[other].shape)}: PEFT has lora_A as (r, inputs) and lora_B as (outputs, r). Transpose them in a state "
                "dict of your own, and save that under the names that adapter_state gives for a model of PEFT",
                [f"{stored}: {tuple(state[stored].shape)} beside {tuple(state[other].shape)}"],
            )
    return state


def _checked_state(state: Mapping[str, Any], *, is_lora: bool) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or not state:
        raise TypeError(f"expected a model or arrays by name, and found {str(state)[:200]!r}. Nothing was written")
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is no text; PEFT has names such as 'base_model.model.q.lora_A.weight'")
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"{name[:200]!r} is a {type(value).__qualname__}; an adapter is arrays by name. Nothing was written"
            )
        if is_lora:
            check_stored_name(name)
    return dict(state)


def _config_of(model: torch.nn.Module, adapter_name: str) -> object:
    held = _peft_config(model, adapter_name)
    if held is None:
        raise TypeError(
            f"config=None, and the {type(model).__qualname__} has no config of an adapter {adapter_name!r}: pass what is to stand in "
            "adapter_config.json"
        )
    return held


def _peft_config(model: torch.nn.Module, adapter_name: str) -> object:
    """What PEFT keeps with a model; None where it is none of PEFT's."""
    held = getattr(getattr(model, "_orig_mod", model), "peft_config", None)
    return held.get(adapter_name) if isinstance(held, Mapping) else None


def _stored_config(found: ckptcore.CheckpointMetadata, location: object) -> AdapterConfig:
    if _CONFIG not in found.custom:
        raise CheckpointNotFoundError(
            f"{location} has arrays of an adapter and no {_CONFIG_FILE} that can be read and says what they are for: give the directory that PEFT or "
            "save_adapter made, or load the arrays alone with ckptcore.load"
        )
    return stored_config(found.custom[_CONFIG], location)
