"""Training runs that tests save in several ways, load into objects in several conditions, and continue."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from ckptcore_torch.named_optimizers import NamedOptimizer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptcore
from tests.jobs.torch_groups import process_group

Make: TypeAlias = Callable[[torch.nn.Module], Any]

FORMS: Final = ("plain", "DDP", "recomputed", "compiled", "FSDP2")
"""Wrappers of the model: none, DistributedDataParallel, activation checkpointing, torch.compile, fully_shard."""

CONDITIONS: Final = ("new", "stepped", "on meta")
"""Conditions of the model and the optimizer before the load."""

_LAYOUTS: Final = ("zarr3", "safetensors", "ocdbt", "dcp")

SOURCES: Final = (*_LAYOUTS, "DCP of PyTorch", "torch.save")
"""Writers of the checkpoint: four layouts of ckptcore, and two formats of PyTorch."""


def dense(width: int = 8, *, bias: bool = True) -> torch.nn.Module:
    """Return a network of two linear layers."""
    first, second = (torch.nn.Linear(width, width, bias=bias) for _ in range(2))
    return torch.nn.Sequential(first, torch.nn.Tanh(), second)


matrices: Final = functools.partial(dense, bias=False)

wide: Final = functools.partial(dense, 64)
"""Layers of 4096 elements. Optimizers with states of 8 bits do not quantise smaller ones."""


def embedding() -> torch.nn.Module:
    """Return an embedding with sparse gradients."""
    return torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Tanh())


@dataclass(frozen=True)
class Cell:
    """One way to save and load.

    Attributes:
        form: one of `FORMS`.
        named: True to save and load a `NamedOptimizer`, False for the optimizer itself.
        condition: one of `CONDITIONS`.
        source: one of `SOURCES`.
    """

    form: str
    named: bool
    condition: str
    source: str

    def __str__(self) -> str:
        return f"{self.form}, {'named' if self.named else 'numbered'}, {self.condition}, {self.source}"

    @property
    def is_ours(self) -> bool:
        """True if ckptcore writes the checkpoint."""
        return self.source in _LAYOUTS


@dataclass(frozen=True)
class Run:
    """A model in a wrapper, and its optimizer.

    Attributes:
        model: the wrapped model, which is saved.
        network: the module that training calls.
        optimizer: the optimizer of the model's parameters.
        make: function that creates an optimizer from a model.
    """

    model: Any
    network: Any
    optimizer: Any
    make: Make

    @classmethod
    def of(cls, model: Callable[[], torch.nn.Module], make: Make, form: str, seed: int, device: str = "cpu") -> Run:
        """Create a model with new parameters, wrap it, and create its optimizer."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            bare = model()
        if form == "FSDP2":
            mesh = init_device_mesh("cpu", (1,))
            wrapped: Any = fully_shard(bare, mesh=mesh)
        elif form == "DDP":
            wrapped = DistributedDataParallel(bare)
        elif form == "recomputed":
            wrapped = checkpoint_wrapper(bare)
        elif form == "compiled":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the import of the compiler warns
                wrapped = torch.compile(bare)
        else:
            wrapped = bare
        return cls(wrapped, bare if form == "compiled" else wrapped, make(wrapped), make)

    def train(self, numbers: Sequence[int]) -> None:
        """Run training steps. The inputs of a step depend only on its number."""
        with torch.compiler.set_stance("force_eager"):  # torchao would compile the steps of its optimizers for minutes
            for number in numbers:
                if self._takes_a_function:
                    self.optimizer.step(functools.partial(self._loss, number))
                else:
                    self._loss(number)
                    self.optimizer.step()

    def with_new_optimizer(self) -> Run:
        """Return the run with a new optimizer of the same parameters."""
        return replace(self, optimizer=self.make(self.model))

    def objects(self, *, named: bool) -> dict[str, Any]:
        """Return the objects that ckptcore saves and loads."""
        return {
            "model": self.model,
            "optimizer": NamedOptimizer(self.model, self.optimizer) if named else self.optimizer,
        }

    def save(self, location: Path, cell: Cell) -> Path:
        """Save as a cell says, and return the location to load from."""
        if cell.is_ours:
            ckptcore.save(location, self.objects(named=cell.named), layout=cell.source)
            return location
        state: dict[str, Any]
        if cell.named:
            options = StateDictOptions(full_state_dict=cell.source == "torch.save")
            state = {
                "model": get_model_state_dict(self.model, options=options),
                "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
            }
        else:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if cell.source == "torch.save":
            torch.save(state, location)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCP warns if no process group exists
                dcp.save(state, checkpoint_id=location)
        return location

    def state(self) -> Any:
        """Return a comparable form of the model and the optimizer. It shares no memory with them."""
        slots = [self.optimizer.state.get(parameter) for parameter in self._parameters()]
        return bits([self.parameters(), slots, self.optimizer.param_groups])

    def parameters(self) -> dict[str, Any]:
        """Return the parameters by name, without the prefixes of wrappers."""
        named = self.network.state_dict()
        return {name.removeprefix("module."): tensor for name, tensor in named.items()}

    @property
    def _takes_a_function(self) -> bool:
        return isinstance(self.optimizer, torch.optim.LBFGS)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _loss(self, number: int) -> Any:
        self.optimizer.zero_grad()
        loss = (self.network(self._inputs(number)) - number / 10).square().mean()
        loss.backward()
        return loss

    def _inputs(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        for layer in self.network.modules():
            if isinstance(layer, torch.nn.Embedding):
                return torch.randint(layer.num_embeddings, (5,), generator=generator)
            if isinstance(layer, torch.nn.Linear):
                return torch.randn(4, layer.in_features, generator=generator)
        raise TypeError("the model has no layer that takes inputs")


def bits(value: Any) -> Any:
    """Return a comparable form of a state: the bytes of tensors, with their dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return "meta", str(value.dtype), tuple(value.shape)
        local = value.to_local() if isinstance(value, DTensor) else value
        if hasattr(local, "__tensor_flatten__"):
            names, context = local.__tensor_flatten__()
            return type(local).__name__, {name: bits(getattr(local, name)) for name in names}, repr(context)
        flat = local.detach().reshape(-1).contiguous()
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [bits(child) for child in value]
    return bits(vars(value)) if hasattr(value, "__dict__") and not callable(value) else value


@contextlib.contextmanager
def job(form: str) -> Iterator[None]:
    """Run with a process group of one process, if the form needs a group."""
    if form not in ("DDP", "FSDP2"):
        yield
        return
    with process_group():
        yield
