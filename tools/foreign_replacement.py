"""Replace modules of a library by ours in every process of its tests, and count the calls of ckptcore by ours.

Each Python process that `tools.foreign_tests` starts imports this module, so it imports no more than it needs.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

REPLACED_LIBRARY: Final = "CKPTCORE_REPLACED_LIBRARY"
"""Environment variable: the library to replace; empty to replace none."""

TESTED_LIBRARY: Final = "CKPTCORE_TESTED_LIBRARY"
"""Environment variable: the library whose tests run."""

CALLS: Final = "CKPTCORE_CALLS"
"""Environment variable: a file whose size is the number of calls."""

_ORBAX: Final = "orbax.checkpoint.experimental.v1"
_OURS: Final = "ckptcore_integrations"

REPLACED: Final[Mapping[str, Mapping[str, str]]] = {
    "orbax": {
        f"{_ORBAX}._src.saving.saving": f"{_OURS}.orbax_v1.saving",
        f"{_ORBAX}._src.loading.loading": f"{_OURS}.orbax_v1.trees",
        f"{_ORBAX}._src.metadata.loading": f"{_OURS}.orbax_v1.trees",
        f"{_ORBAX}._src.partial.saving": f"{_OURS}.orbax_v1.partial",
        f"{_ORBAX}._src.training.checkpointer": f"{_OURS}.orbax_v1.training",
        _ORBAX: f"{_OURS}.orbax_v1",
    },
    "safetensors": {
        "safetensors.torch": f"{_OURS}.safetensors.torch",
        "safetensors.numpy": f"{_OURS}.safetensors.numpy",
        "safetensors.flax": f"{_OURS}.safetensors.flax",
        "safetensors": f"{_OURS}.safetensors",
    },
    "torch": {"torch.distributed.checkpoint": f"{_OURS}.torch_dcp"},
}
"""The modules of each library that are replaced, and ours."""


def replace_modules(library: str) -> None:
    """Put our modules in place of those of a library, for all later imports in this process.

    A package keeps its other names and its submodules. Any other module is replaced as a whole, so that tests which
    patch its functions patch those that are called.
    """
    pairs = [(importlib.import_module(a), importlib.import_module(b)) for a, b in REPLACED[library].items()]
    for theirs, ours in pairs:
        if hasattr(theirs, "__path__"):
            _keep_original(theirs)
            vars(theirs).update({name: getattr(ours, name) for name in ours.__all__})
            continue
        for name, value in vars(theirs).items():
            vars(ours).setdefault(name, value)
        sys.modules[theirs.__name__] = ours
        package, _, name = theirs.__name__.rpartition(".")
        setattr(sys.modules[package], name, ours)
    if library == "torch":
        for name in ("Reader", "Writer"):
            setattr(pairs[0][0], f"FileSystem{name}", _without_options(getattr(pairs[0][1], name)))


def _keep_original(package: ModuleType) -> None:
    """Give our modules a copy of the original package: they call functions that are then replaced in the package."""
    original = ModuleType(package.__name__)
    vars(original).update(vars(package))
    for module in _our_modules():
        for name in [name for name, value in vars(module).items() if value is package]:
            setattr(module, name, original)


def _our_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(f"{_OURS}.")]


def _without_options(ours: type) -> type:
    """Return a subclass of our reader or writer that ignores all options of torch's class except ``overwrite``.

    The subclass is also stored under its name in this module, so that pickle finds it.
    """

    def __init__(self: Any, path: Any, *_: Any, **options: Any) -> None:
        ours.__init__(self, path, **{key: value for key, value in options.items() if key == "overwrite"})  # type: ignore[misc]

    made = type(f"{ours.__name__}WithoutOptions", (ours,), {"__init__": __init__, "__module__": __name__})
    globals()[made.__name__] = made
    return made


def count_calls(file: Path) -> None:
    """Count the calls of functions of ckptcore in our modules: each adds a byte to a file, from any process."""
    for module in _our_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and value.__name__ == "ckptcore":
                setattr(module, name, _CountingModule(value, file))
            elif _is_of_ckptcore(value):
                setattr(module, name, _counted(value, file))


def _is_of_ckptcore(value: object) -> bool:
    package = value.__module__.partition(".")[0] if isinstance(value, FunctionType) else ""
    return package.startswith("ckptcore") and package != _OURS


def _counted(function: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with file.open("ab") as counter:
            counter.write(b".")
        return function(*args, **kwargs)

    return call


class _CountingModule(ModuleType):
    """The module `ckptcore`, whose functions count their calls."""

    def __init__(self, original: ModuleType, file: Path) -> None:
        super().__init__(original.__name__)
        self._original = original
        self._file = file

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        return _counted(value, self._file) if _is_of_ckptcore(value) else value


def _fork_processes(case: Any) -> None:
    """Start the processes of a test of torch by forking, because each would otherwise import torch for seconds."""
    case._start_processes(multiprocessing.get_context("fork").Process)


def start_process() -> None:
    """Prepare a process of the tests: the test process itself, and each one that it starts."""
    if os.environ.get(TESTED_LIBRARY) == "torch":
        distributed: Any = importlib.import_module("torch.testing._internal.common_distributed")
        distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda function: function
        distributed.MultiProcessTestCase._spawn_processes = _fork_processes
    if library := os.environ.get(REPLACED_LIBRARY):
        replace_modules(library)
        count_calls(Path(os.environ[CALLS]))
