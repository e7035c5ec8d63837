"""The hooks of the toy storage."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageOpener


@hookimpl
def ckpt_storages() -> Mapping[str, StorageOpener]:
    """Return the storage of the scheme ``toy``."""
    from toyattic.storage import open_attic

    return {"toy": open_attic}
