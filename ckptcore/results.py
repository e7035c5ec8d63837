"""Types of the results of saves, loads, `ckptcore.open`, `metadata` and `verify`.

Programs import these types for annotations. Programs create only `LoadReport`, to pass it as ``report=``.
"""

# ruff: noqa: PLC0414  # names for type checkers, as in `ckptcore`
import importlib
from typing import TYPE_CHECKING, Final

# Each name is imported at its first use, as in `ckptcore`: importing all of them would import the whole library.
_NAMES: Final = {
    "ckptcore.io.background": "LoadHandle SaveHandle",
    "ckptcore.inspection.completeness": "Problem",
    "ckptcore.inspection.describe": "CheckpointMetadata CheckpointablesMetadata",
    "ckptcore.matching.options": "LeafChange LoadReport",
    "ckptcore.on_demand.boxes": "LoadedBox",
    "ckptcore.on_demand.checkpoints": "OpenCheckpoint StoredTree",
    "ckptcore.on_demand.arrays": "StoredArray",
    "ckptcore.inspection.verify": "VerifyReport",
    "ckptcore.progress": "Progress ProgressCallback",
    "ckptcore.training.restoring": "SkippedStep",
}
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from ckptcore.inspection.completeness import Problem as Problem
    from ckptcore.inspection.describe import CheckpointablesMetadata as CheckpointablesMetadata
    from ckptcore.inspection.describe import CheckpointMetadata as CheckpointMetadata
    from ckptcore.inspection.verify import VerifyReport as VerifyReport
    from ckptcore.io.background import LoadHandle as LoadHandle
    from ckptcore.io.background import SaveHandle as SaveHandle
    from ckptcore.matching.options import LeafChange as LeafChange
    from ckptcore.matching.options import LoadReport as LoadReport
    from ckptcore.on_demand.arrays import StoredArray as StoredArray
    from ckptcore.on_demand.boxes import LoadedBox as LoadedBox
    from ckptcore.on_demand.checkpoints import OpenCheckpoint as OpenCheckpoint
    from ckptcore.on_demand.checkpoints import StoredTree as StoredTree
    from ckptcore.progress import Progress as Progress
    from ckptcore.progress import ProgressCallback as ProgressCallback
    from ckptcore.training.restoring import SkippedStep as SkippedStep
else:
    __all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value: object = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | _HOMES.keys())
