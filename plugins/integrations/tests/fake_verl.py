"""The base classes of verl's checkpoint engines, without verl: what `ckptcore_integrations.verl` imports.

`make test-engines` compares the signatures with those of verl, and runs the same tests with verl.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar


class CheckpointEngineRegistry:
    """Engines by name."""

    _registry: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[Any], Any]:
        """Register a class."""

        def wrapper(cls: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        """Create an engine."""
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngine(ABC):
    """The abstract methods of an engine."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineWithCache(CheckpointEngine):
    """An engine with a local cache."""

    @abstractmethod
    async def get_weights(self) -> Any: ...


@contextmanager
def installed() -> Iterator[None]:
    """Replace the modules of verl by these classes."""
    base = ModuleType("verl.checkpoint_engine.base")
    base.__dict__.update(
        CheckpointEngineRegistry=CheckpointEngineRegistry, CheckpointEngineWithCache=CheckpointEngineWithCache
    )
    modules = {name: ModuleType(name) for name in ("verl", "verl.checkpoint_engine")} | {base.__name__: base}
    names = (*modules, "ckptcore_integrations.verl")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
