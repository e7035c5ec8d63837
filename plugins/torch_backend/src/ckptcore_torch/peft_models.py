"""Adapters of models that PEFT created: PEFT selects, names and converts their parameters itself.

PEFT has a rule for each of its methods. For prompt methods, PEFT computes the prompts. For AdaLoRA, it saves the ranks
that were kept, and for VB-LoRA the largest logits. For some other methods, it saves matrices that the whole model
shares (peft 0.21.2, ``get_peft_model_state_dict``). PEFT is imported only for models that have a config of PEFT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from ckptcore.errors import TreeMismatchError
from ckptcore.model import JSON
from ckptcore_torch.adapter_names import PREFIX, Biases, config_json, without_wrappers

_MAX_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter of a model that PEFT created, or to which it added the adapter.

    Attributes:
        model: the model, without the wrappers of data-parallel training and torch.compile.
        own: its state dict.
        adapter_name: name of the adapter.
    """

    model: Any  # `peft.PeftModel`, or a model of transformers: see `peft_adapter`
    own: Mapping[str, torch.Tensor]
    adapter_name: str

    @property
    def config(self) -> Any:
        """The config of PEFT."""
        return self.model.peft_config[self.adapter_name]

    def tensors(self, biases: Biases | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors that PEFT saves, by PEFT's names.

        Gathers DTensors; most others share memory with the model.

        Args:
            biases: biases of the base model to include. None means the choice in the config.
        """
        with self._unchanged_config() as config:
            if biases is not None:
                config.bias = biases
            saved = self._saved()
        return {
            self._stored_name(name): tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in saved.items()
        }

    def saved_config(self) -> dict[str, JSON]:
        """Return the config as ``save_pretrained`` writes it."""
        self._saved()  # writes the ranks of AdaLoRA into the config
        config = self.config
        fields = config.to_dict()
        if self._has_prefix:
            inner = self.model.base_model if config.is_prompt_learning else self.model.base_model.model
            fields["inference_mode"] = True
            fields["base_model_name_or_path"] = (
                config.base_model_name_or_path or vars(inner).get("name_or_path") or None
            )
            if config.task_type is None:
                kind = type(inner)
                fields["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        return config_json(fields)

    def check_saved(self) -> None:
        """Check that PEFT saves every trainable parameter, or a value that it computes from the parameter.

        Raises:
            TreeMismatchError: if PEFT does not save some of them. The error names them. Parameters
                of other adapters need not be saved.
        """
        active = getattr(self.model, "active_adapters", None)
        active = active() if callable(active) else active
        if isinstance(active, list) and self.adapter_name not in active:
            return  # the trainable parameters belong to the active adapters
        saved, owners = self._saved(), self._owners()
        identities = {id(tensor) for tensor in saved.values()}
        parameters = list(self.model.named_parameters(remove_duplicate=False))
        plain = {without_wrappers(name): tensor for name, tensor in self.own.items()}
        held = {id(parameter) for name, parameter in parameters if id(plain.get(without_wrappers(name))) in identities}
        lost = [
            name
            for name, parameter in parameters
            if parameter.requires_grad
            and id(parameter) not in held
            and not (name in owners and (owners[name] != self.adapter_name or self._is_computed(name, saved)))
        ]
        if lost:
            raise unsaved_error(lost, self.adapter_name)

    def current(self, stored_config: Mapping[str, JSON], stored: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors that PEFT would save with a stored config, as targets of a load.

        Args:
            stored_config: the stored config. It determines which tensors PEFT stores, such as the
                ranks of AdaLoRA.
            stored: names of the stored arrays. The result includes stored tensors of the base
                model.

        Raises:
            TreeMismatchError: if the stored adapter uses another method, or if the model computes
                its prompts from parameters that PEFT does not store.
        """
        kind = self.config.peft_type
        if stored_config["peft_type"] != kind:
            raise TreeMismatchError(
                f"the adapter has the method {stored_config['peft_type']}, and {self.adapter_name!r} in the model "
                f"{kind.value}: load it with PeftModel.load_adapter, or set adapter_name=",
                [f"peft_type: {stored_config['peft_type']} instead of {kind.value}"],
            )
        self._check_prompts()
        with self._unchanged_config() as config:
            config.inference_mode = True  # take the stored prompts, without computing them
            for name, value in stored_config.items():
                if (name.startswith("save_") or name == "rank_pattern") and hasattr(config, name):
                    setattr(config, name, value)
            tensors = {self._stored_name(name): tensor for name, tensor in self._saved().items()}
        plain = {self._stored_name(name): tensor for name, tensor in self.own.items()}
        tensors |= {name: plain[name] for name in stored if name not in tensors and name in plain}
        return {name: tensor if tensor.is_meta else tensor.detach().clone() for name, tensor in tensors.items()}

    def fill(self, tensors: Mapping[str, torch.Tensor], stored_config: Mapping[str, JSON]) -> None:
        """Copy the tensors of `current` into the adapter, with PEFT's own function."""
        from peft import set_peft_model_state_dict  # see the first lines

        names = {self._stored_name(name): name for name in [*self.own, *self._saved()]}
        state = {names.get(stored, stored): tensor for stored, tensor in tensors.items()}
        is_meta = any(tensor.is_meta for tensor in self._saved().values())
        with self._unchanged_config() as config:
            if config.peft_type == "ADALORA":
                config.rank_pattern = None
                saved = self._saved()
                if any(name in saved and saved[name].shape != tensor.shape for name, tensor in state.items()):
                    config.rank_pattern = stored_config["rank_pattern"]  # PEFT resizes the modules by it
            set_peft_model_state_dict(self.model, state, self.adapter_name, low_cpu_mem_usage=is_meta)
        if self.config.peft_type == "ADALORA":
            self.config.rank_pattern = stored_config.get("rank_pattern")

    @property
    def _has_prefix(self) -> bool:
        """True if PEFT wraps the model. False if PEFT only added layers to a model of transformers."""
        from peft import PeftMixedModel, PeftModel  # see the first lines

        return isinstance(self.model, PeftModel | PeftMixedModel)

    def _stored_name(self, name: str) -> str:
        return without_wrappers(name) if self._has_prefix else PREFIX + without_wrappers(name)

    def _saved(self) -> dict[str, torch.Tensor]:
        """Return the tensors that PEFT saves, by the names that PEFT uses for this model.

        PEFT drops all names that contain the name of another adapter. If an adapter has the name
        "0", as in X-LoRA, PEFT would also drop ``layers.0``. To avoid this, PEFT gets only the
        config of this adapter, and a state without parameters of other adapters.
        """
        from peft import get_peft_model_state_dict  # see the first lines

        configs = self.model.peft_config
        every = dict(configs)
        owners = self._owners()
        own = {
            name: tensor
            for name, tensor in self.own.items()
            if owners.get(name, self.adapter_name) == self.adapter_name
        }
        try:
            for other in every.keys() - {self.adapter_name}:
                del configs[other]
            return dict(get_peft_model_state_dict(self.model, own, self.adapter_name))
        finally:
            configs.clear()
            configs.update(every)

    def _owners(self) -> dict[str, str]:
        """Return the adapter of each parameter that belongs to an adapter.

        The name of the adapter is the key of the parameter or module in its container.
        """
        kinds = (torch.nn.ModuleDict, torch.nn.ParameterDict)
        containers = {
            without_wrappers(name)
            for name, module in self.model.named_modules(remove_duplicate=False)
            if isinstance(module, kinds) or type(module).__name__ == "BufferDict"  # a class that PEFT does not export
        }
        owners = {}
        for name in [*self.own, *[name for name, _ in self.model.named_parameters(remove_duplicate=False)]]:
            segments = without_wrappers(name).split(".")
            for number, segment in enumerate(segments):
                if segment in self.model.peft_config and ".".join(segments[:number]) in containers:
                    owners[name] = segment
        return owners

    @contextmanager
    def _unchanged_config(self) -> Iterator[Any]:
        """Yield the config, and undo all changes of it on exit."""
        config = self.config
        fields = dict(vars(config))
        try:
            yield config
        finally:
            vars(config).update(fields)

    def _is_computed(self, name: str, saved: Iterable[str]) -> bool:
        """Return True if PEFT saves a value that it computes from this parameter of the adapter."""
        segments = without_wrappers(name).split(".")
        stem = ".".join([segment for segment in segments if segment != self.adapter_name])
        return segments[0] == "prompt_encoder" or any(
            without_wrappers(saved_name).startswith(stem) for saved_name in saved
        )

    def _check_prompts(self) -> None:
        if not self.config.is_prompt_learning or self.config.inference_mode:
            return
        computed = self._saved()
        with self._unchanged_config() as config:
            config.inference_mode = True
            used = self._saved()
        if any(not torch.equal(used[name].detach().cpu(), tensor.detach().cpu()) for name, tensor in computed.items()):
            trained = f"prompt_encoder.{self.adapter_name}"
            raise TreeMismatchError(
                f"{trained}: the model computes its prompts from parameters that PEFT does not store, so the stored "
                "prompts cannot be trained further: load them for inference with PeftModel.from_pretrained; to resume "
                "a training, save and load the state of the whole model with ckptcore.save and load_into",
                [trained],
            )


def peft_adapter(model: torch.nn.Module, own: Mapping[str, torch.Tensor], adapter_name: str) -> PeftAdapter | None:
    """Return the adapter if the model has PEFT's config for it, and None otherwise.

    Args:
        model: the model without wrappers.
        own: its state dict.
        adapter_name: name of the adapter.
    """
    configs = getattr(model, "peft_config", None)
    config = configs.get(adapter_name) if isinstance(configs, Mapping) else None
    if any(kind.__module__.partition(".")[0] == "peft" for kind in type(config).__mro__):
        return PeftAdapter(model, own, adapter_name)
    return None


def unsaved_error(lost: Sequence[str], adapter_name: str) -> TreeMismatchError:
    """Return the error for trainable parameters that are not part of an adapter."""
    more = f" and {len(lost) - _MAX_NAMED} others" if len(lost) > _MAX_NAMED else ""
    module = lost[0].removeprefix(PREFIX).rpartition(".")[0].rpartition(".")[2] or lost[0]
    return TreeMismatchError(
        f"{', '.join(lost[:_MAX_NAMED])}{more}: trainable, but not a part of the adapter {adapter_name!r} as PEFT "
        "saves it. If it was trained, save the state of the whole model with ckptcore.save, and name its module in the "
        f"config of the next training, such as modules_to_save=[{module!r}]. If not, call requires_grad_(False) on "
        "it. Nothing was written",
        lost,
    )
