"""Hook of the plugin. fsspec is imported for the first scheme that no other plugin opens."""

from __future__ import annotations

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageOpener


@hookimpl
def ckpt_storage_for(scheme: str) -> StorageOpener | None:
    """Return the opener of a scheme that fsspec knows, with or without the prefix ``fsspec+``."""
    from ckptcore_fsspec.opening import open_url, opens

    return open_url if opens(scheme) else None
