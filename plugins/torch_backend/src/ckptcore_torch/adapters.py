"""Adapters in the format of PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``.

PEFT can load adapters saved with this module (``PeftModel.from_pretrained``), and this module can
load adapters saved by PEFT (``save_pretrained``). PEFT and this module store the same elements and
JSON. This module saves the two files as one atomic checkpoint with checksums. The names of
parameters and the fields of the config are those of peft 0.21.2. PEFT need not be installed: this
module knows the names of LoRA itself. For a model that PEFT created, PEFT is installed and names
the parameters.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

import ckptcore
from ckptcore.errors import (
    AtomicityError,
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    TreeMismatchError,
)
from ckptcore.model import JSON
from ckptcore.protocols import CheckpointInfo, Snapshot, WriteStore
from ckptcore_torch.adapter_names import (
    AdapterConfig,
    AdapterNames,
    Biases,
    LoraName,
    SupportsToDict,
    check_method,
    check_stored_name,
    config_json,
    is_lora,
    names_of_adapter,
    plain_name,
    stored_config,
)
from ckptcore_torch.peft_models import peft_adapter, unsaved_error

__all__ = ["Adapter", "AdapterLayout", "adapter_state", "load_adapter", "load_adapter_into", "save_adapter"]

_CONFIG_FILE: Final = "adapter_config.json"
_CONFIG: Final = "adapter_config"
"""Metadata key of the config, also for checkpoints that PEFT wrote."""
_ATTEMPTS: Final = 20
_OF_FSDP: Final = "_fsdp_wrapped_module"
_WRAPPED: Final = ("_orig_mod", _OF_FSDP)
"""Attributes in which the wrappers of torch.compile and FSDP 1 hold the model."""
_EXACT: Final = ckptcore.Matching()

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter.

    Attributes:
        arrays: NumPy arrays by PEFT's names.
        config: fields of ``adapter_config.json``.
    """

    arrays: Mapping[str, Any]
    config: AdapterConfig


@dataclass(frozen=True, slots=True)
class AdapterLayout(ckptcore.SafetensorsLayout):
    """The safetensors layout with a single file, as PEFT expects it, and the config.

    Attributes:
        max_file_bytes: unlimited, because PEFT reads only one file.
        stem: stem of the file name.
        standalone: True, because users copy and share the file of an adapter without the root of
            the checkpoint.
        config: content of ``adapter_config.json``. If you save with `ckptcore.save`, also pass
            ``metadata={"adapter_config": config}``, which `load_adapter` needs.

    Raises:
        ValueError, TypeError: for an invalid config.
    """

    max_file_bytes: int = sys.maxsize
    stem: str = "adapter_model"
    standalone: bool = field(default=True, kw_only=True)
    config: AdapterConfig = field(kw_only=True, hash=False)

    def __post_init__(self) -> None:
        ckptcore.SafetensorsLayout.__post_init__(self)  # a dataclass with slots is a new class, which breaks super()
        object.__setattr__(self, "config", config_json(self.config))

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the file.

        Raises:
            AtomicityError: if this process has only a part of the adapter, because PEFT needs whole
                tensors in one file.
        """
        plan = snapshot.plan
        arrays = sum(len(leaves) for leaves in self.arrays_by_object(plan.tree))
        for item in plan.items:
            if sum(box.size for box in item.boxes) != item.spec.size or len(plan.items) != arrays:
                raise AtomicityError(
                    f"process {plan.rank} has only a part of the adapter, but PEFT needs whole "
                    "tensors in one file; gather them first in every process, for example with "
                    "DTensor.full_tensor"
                )
        return ckptcore.SafetensorsLayout.write(self, snapshot, store)

    def write_metadata_files(self, info: CheckpointInfo, store: WriteStore) -> None:
        """Write the config.

        Raises:
            CompositeCheckpointError: for several checkpointables, because the config would be in
                the wrong directory.
        """
        if info.members:
            raise CompositeCheckpointError(
                f"cannot save {', '.join(info.members)} together as an adapter: an adapter is "
                "one tree. Save each to its own location. Nothing was committed",
                list(info.members),
            )
        store.put(_CONFIG_FILE, json.dumps(self.config, indent=2, sort_keys=True).encode())


def adapter_state(
    model: torch.nn.Module, adapter_name: str = "default", *, biases: Biases | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by PEFT's names: LoRA matrices, magnitudes and trained modules.

    Call it in every process of a job, because it gathers DTensors. It copies only tensors that
    share their memory with another tensor. For a model that PEFT created, PEFT selects the tensors,
    as in ``save_pretrained``. In other models, this function finds LoRA parameters by their names.
    LoRA parameters without an adapter name belong to every adapter. The result for such a model contains only the
    chosen biases of the base model, but no resized embeddings, which PEFT would also save.

    Args:
        model: the model, also compiled or in wrappers of data-parallel training.
        adapter_name: name of the adapter.
        biases: biases of the base model to include. None means the choice in the config of PEFT, or
            ``"none"`` if the model has no config.

    Raises:
        TreeMismatchError: if there is no such adapter, or if matrices are transposed.
        NameCollisionError: if two parameters have the same PEFT name.
    """
    model, own = _unwrap(model)
    if (peft := peft_adapter(model, own, adapter_name)) is not None:
        return _without_aliases(peft.tensors(biases))
    chosen: Biases = getattr(_peft_config(model, adapter_name), "bias", "none") if biases is None else biases
    return _adapter_tensors(own, names_of_adapter(_without_tied_tokens(own), adapter_name, chosen))


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
    """Save an adapter, and return after the commit.

    For a model that PEFT created, PEFT selects, names and converts the tensors. In a job, every
    process calls this function.

    Args:
        location: path or URL of the directory to create.
        model_or_state: a model with the adapter, or arrays of any framework by PEFT's names.
        config: a config of PEFT, or its JSON; None for the config of the model.
        adapter_name: name of the adapter in the model.
        overwrite, metadata, context: see `ckptcore.save`. The metadata gets the config as
            ``adapter_config``.

    Raises:
        ValueError, TypeError: for an invalid config, array or metadata; nothing is written.
        TreeMismatchError: for names that PEFT does not use, if there is no such adapter, or if a
            trainable parameter would not be saved; nothing is written.
        AtomicityError: if this process has only a part of an array. Gather it first in every
            process, for example with `DTensor.full_tensor`.
        CheckpointError: see `ckptcore.save`.
    """
    if isinstance(model_or_state, torch.nn.Module):
        state, fields = _adapter_of(model_or_state, config, adapter_name)
    elif config is None:
        raise TypeError("config=None: arrays have no config; pass the content of adapter_config.json")
    else:
        fields = config_json(config)
        check_method(fields)
        state = _check_state(model_or_state, is_lora=is_lora(fields))
    if metadata is not None and _CONFIG in metadata:
        raise ValueError(f"metadata= has the reserved key {_CONFIG!r}; choose another name. Nothing was written")
    ckptcore.save(
        location,
        state,
        layout=AdapterLayout(config=fields),
        overwrite=overwrite,
        metadata={**(metadata or {}), _CONFIG: fields},
        context=context,
    )


def load_adapter(location: str | os.PathLike[str], *, context: ckptcore.Context | None = None) -> Adapter:
    """Load an adapter saved by `save_adapter` or PEFT.

    Raises:
        CheckpointNotFoundError: if there is no adapter, or it has no config.
        CorruptCheckpointError: if its arrays or its config cannot be read.
    """

    def load(source: str, metadata: ckptcore.results.CheckpointMetadata, config: AdapterConfig) -> Adapter:
        return Adapter(ckptcore.load(source, context=context), config)

    return _retry_if_replaced(location, context, load)


@CheckpointError.offering("matching")
def load_adapter_into(
    location: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    adapter_name: str = "default",
    matching: ckptcore.Matching = _EXACT,
    context: ckptcore.Context | None = None,
) -> AdapterConfig:
    """Load an adapter into a model that has an adapter of the same shapes. Return its config.

    Parameters keep their memory. Only parameters on the meta device and parameters whose rank
    AdaLoRA reduced are replaced. Entries of the base model that were saved with the adapter
    (biases, embeddings) are also loaded.

    Args:
        location: path or URL of the adapter.
        model: the model. It need not be created by PEFT.
        adapter_name: name of the adapter in the model. It may have been saved under another name.
        matching: differences to allow, such as another dtype: see `ckptcore.load_into`.
        context: options.

    Raises:
        TreeMismatchError: if names, shapes or dtypes differ, and ``matching`` does not allow it.
            The error lists every difference. Also raised if the model computes its prompts from parameters that PEFT
            does not save. The model is unchanged.
        TypeError: if FullyShardedDataParallel wraps the model.
        TargetUndefinedError: if the load fails partway. The model then has old and new values.
        CheckpointNotFoundError, CorruptCheckpointError: see `load_adapter`.
    """
    if any(hasattr(module, _OF_FSDP) for module in model.modules()):
        raise TypeError(
            f"the {type(model).__qualname__} is sharded by FullyShardedDataParallel, which flattens its parameters: "
            "load the adapter before it wraps the model, or use fully_shard"
        )
    model, own = _unwrap(model)
    peft = peft_adapter(model, own, adapter_name)

    def load(source: str, metadata: ckptcore.results.CheckpointMetadata, config: AdapterConfig) -> AdapterConfig:
        stored_names = metadata.abstract if isinstance(metadata.abstract, Mapping) else {}
        if peft is not None:
            tensors = peft.current(config, stored_names)
            ckptcore.load_into(source, tensors, matching=matching, context=context)
            peft.fill(tensors, config)
            return config
        names = dict(names_of_adapter(_without_tied_tokens(own), adapter_name).by_stored)
        plain = {plain_name(name): name for name in own}
        names |= {stored: plain[stored] for stored in stored_names if stored not in names and stored in plain}
        target = {stored: own[name] for stored, name in names.items()}
        ckptcore.load_into(source, target, matching=matching, context=context)
        lacking = {name: target[stored] for stored, name in names.items() if own[name].is_meta}
        if lacking:
            model.load_state_dict(lacking, strict=False, assign=True)
        return config

    return _retry_if_replaced(location, context, load)


def _retry_if_replaced(
    location: str | os.PathLike[str],
    context: ckptcore.Context | None,
    load: Callable[[str, ckptcore.results.CheckpointMetadata, AdapterConfig], Loaded],
) -> Loaded:
    """Call `load`, and repeat it if the adapter was replaced meanwhile. So arrays and config are from the same save."""
    for _ in range(_ATTEMPTS):
        source, metadata = _find_adapter(os.fspath(location), context)
        loaded = load(source, metadata, _stored_config(metadata, location))
        if ckptcore.metadata(source, context=context).save_id == metadata.save_id:
            return loaded
    raise CorruptCheckpointError(
        f"{location} was replaced during each of {_ATTEMPTS} attempts to load it; load it while no job saves to it"
    )


def _find_adapter(location: str, context: ckptcore.Context | None) -> tuple[str, ckptcore.results.CheckpointMetadata]:
    """Return the location of the adapter, and its metadata.

    If the directory also contains the base model, the location is the file of the adapter.
    """
    metadata = ckptcore.metadata(location, context=context)
    if _CONFIG not in metadata.custom:
        file = f"{location.rstrip('/')}/adapter_model.safetensors"
        try:
            return file, ckptcore.metadata(file, context=context)
        except CheckpointNotFoundError:
            return location, metadata
    return location, metadata


def _unwrap(model: torch.nn.Module) -> tuple[torch.nn.Module, Mapping[str, torch.Tensor]]:
    """Return the model inside wrappers of torch.compile and of data-parallel training, and its state dict."""
    own: Mapping[str, torch.Tensor] | None = None
    while True:
        children = dict(model.named_children())  # models of PEFT forward attributes to the model inside
        attribute = next((name for name in _WRAPPED if name in children), None)
        if attribute == _OF_FSDP:
            own = model.state_dict() if own is None else own  # only the outermost wrapper can gather its parameters
        if attribute is not None:
            model = children[attribute]
        elif isinstance(model, DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        else:
            return model, model.state_dict() if own is None else own


def _adapter_of(
    model: torch.nn.Module, config: AdapterConfig | SupportsToDict | None, adapter_name: str
) -> tuple[Mapping[str, Any], dict[str, JSON]]:
    """Return the arrays and the config of an adapter.

    Raises:
        TreeMismatchError: a trainable parameter would not be saved.
        ValueError, TypeError: the config is invalid, or of a method whose names are not known.
    """
    model, own = _unwrap(model)
    fields = None if config is None else config_json(config)
    if (peft := peft_adapter(model, own, adapter_name)) is not None:
        peft.check_saved()
        tensors = _without_aliases(peft.tensors(None if fields is None else _biases(fields)))
        return tensors, peft.saved_config() if fields is None else fields
    fields = config_json(_config_of(model, adapter_name)) if fields is None else fields
    check_method(fields)
    if not is_lora(fields):
        raise TypeError(
            f"config: peft_type is {fields['peft_type']!r}, and the {type(model).__qualname__} has no config of PEFT, "
            "without which only names of LoRA are known: pass the model that peft.get_peft_model returned, or arrays "
            "by the names that peft.get_peft_model_state_dict returns. Nothing was written"
        )
    names = names_of_adapter(_without_tied_tokens(own), adapter_name, _biases(fields) or "none")
    _check_trained(model, names, adapter_name)
    return _adapter_tensors(own, names), fields


def _without_aliases(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy arrays that share their memory with an earlier one, because PEFT looks for each array by its own name."""
    held: set[tuple[object, ...]] = set()
    result = {}
    for name, array in state.items():
        is_tensor = isinstance(array, torch.Tensor) and not array.is_meta and array.numel()
        memory = (array.data_ptr(), array.shape, array.stride()) if is_tensor else (id(array),)
        result[name] = array if memory not in held else array.clone() if is_tensor else array.copy()
        held.add(memory)
    return result


def _biases(fields: Mapping[str, JSON]) -> Biases | None:
    biases: Any = fields.get("bias")
    chosen: Biases | None = biases  # the config was checked
    return chosen


def _check_trained(model: torch.nn.Module, names: AdapterNames, adapter_name: str) -> None:
    """Check that an adapter has all trainable parameters.

    Skip the check if no parameter is frozen, because then it is unknown which parameters were trained.

    Raises:
        TreeMismatchError: if trainable parameters are missing. The error names them. Parameters of
            other adapters need not be saved.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    if all(parameter.requires_grad for _, parameter in parameters):
        return
    saved = set(names.by_stored.values())
    held = {id(parameter) for name, parameter in parameters if name in saved}
    lost = [
        name
        for name, parameter in parameters
        if parameter.requires_grad
        and id(parameter) not in held
        and ((lora := LoraName.of(name)) is None or lora.adapter in (None, adapter_name))
    ]
    if lost:
        raise unsaved_error(lost, adapter_name)


def _without_tied_tokens(own: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of a state dict.

    A tied token adapter has two names, and only the first is kept, as PEFT does.
    """
    first: dict[tuple[object, ...], str] = {}
    return [
        name
        for name, tensor in own.items()
        if "trainable_tokens_delta" not in name
        or tensor.is_meta
        or first.setdefault((tensor.data_ptr(), tensor.shape), name) == name
    ]


def _adapter_tensors(own: Mapping[str, torch.Tensor], names: AdapterNames) -> dict[str, torch.Tensor]:
    state = _without_aliases({stored: own[name] for stored, name in names.by_stored.items()})
    for stored in names.bare:
        other = stored.replace(".lora_A.", ".lora_B.")
        if stored == other or other not in state:
            continue
        rank, expected = state[stored].shape[:1], state[other].shape[1:2]
        if rank != expected:
            raise TreeMismatchError(
                f"{names.by_stored[stored]!r} has the shape {tuple(state[stored].shape)} and "
                f"{names.by_stored[other]!r} has {tuple(state[other].shape)}, but PEFT needs "
                "lora_A of shape (r, inputs) and lora_B of shape (outputs, r); transpose them in a "
                "state dict with PEFT's names, and save that state dict",
                [f"{stored}: {tuple(state[stored].shape)} and {tuple(state[other].shape)}"],
            )
    return state


def _check_state(state: Mapping[str, Any], *, is_lora: bool) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or not state:
        raise TypeError(f"expected a model or arrays by name, found {str(state)[:200]!r}. Nothing was written")
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(
                f"the name {name!r} is not a string; PEFT uses names such as 'base_model.model.q.lora_A.weight'"
            )
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(f"{name[:200]!r} is a {type(value).__qualname__}; expected an array. Nothing was written")
        if is_lora:
            check_stored_name(name)
    return _without_aliases(state)


def _config_of(model: torch.nn.Module, adapter_name: str) -> object:
    held = _peft_config(model, adapter_name)
    if held is None:
        raise TypeError(
            f"config=None, but the {type(model).__qualname__} has no config of an adapter "
            f"{adapter_name!r}: pass the content of adapter_config.json"
        )
    return held


def _peft_config(model: torch.nn.Module, adapter_name: str) -> object:
    """Return PEFT's config in a model, or None."""
    held = getattr(model, "peft_config", None)
    return held.get(adapter_name) if isinstance(held, Mapping) else None


def _stored_config(metadata: ckptcore.results.CheckpointMetadata, location: object) -> AdapterConfig:
    if _CONFIG not in metadata.custom:
        raise CheckpointNotFoundError(
            f"{location} has no readable {_CONFIG_FILE}: pass a directory that PEFT or "
            "save_adapter wrote, or load only the arrays with ckptcore.load"
        )
    return stored_config(metadata.custom[_CONFIG], location)
