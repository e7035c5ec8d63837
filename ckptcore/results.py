"""Types of the results of saves, loads, `ckptcore.open`, `metadata` and `verify`.

Programs import them for annotations. `LoadReport` is the only one that programs create, to pass it as ``report=``.
"""

# ruff: noqa: PLC0414  # names for type checkers, as in `ckptcore`
import importlib
from typing import TYPE_CHECKING, Final

# Each name is imported when it is first used, as in `ckptcore`, because together they would import the whole library.
_NAMES: Final = {
    "ckptcore.io.background": "LoadHandle SaveHandle",
    "ckptcore.loading.completeness": "Problem",
    "ckptcore.loading.describe": "CheckpointMetadata CheckpointablesMetadata",
    "ckptcore.loading.loaded_boxes": "LoadedBox",
    "ckptcore.loading.load_options": "LeafChange LoadReport",
    "ckptcore.loading.open_checkpoints": "OpenCheckpoint StoredTree",
    "ckptcore.loading.stored_arrays": "StoredArray",
    "ckptcore.loading.verify": "VerifyReport",
    "ckptcore.progress": "Progress ProgressCallback",
    "ckptcore.training.restoring": "SkippedStep",
}
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from ckptcore.io.background import LoadHandle as LoadHandle
    from ckptcore.io.background import SaveHandle as SaveHandle
    from ckptcore.loading.completeness import Problem as Problem
    from ckptcore.loading.describe import CheckpointablesMetadata as CheckpointablesMetadata
    from ckptcore.loading.describe import CheckpointMetadata as CheckpointMetadata
    from ckptcore.loading.load_options import LeafChange as LeafChange
    from ckptcore.loading.load_options import LoadReport as LoadReport
    from ckptcore.loading.loaded_boxes import LoadedBox as LoadedBox
    from ckptcore.loading.open_checkpoints import OpenCheckpoint as OpenCheckpoint
    from ckptcore.loading.open_checkpoints import StoredTree as StoredTree
    from ckptcore.loading.stored_arrays import StoredArray as StoredArray
    from ckptcore.loading.verify import VerifyReport as VerifyReport
    from ckptcore.progress import Progress as Progress
    from ckptcore.progress import ProgressCallback as ProgressCallback
    from ckptcore.training.restoring import SkippedStep as SkippedStep
else:
    __all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        found: object = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | _HOMES.keys())
