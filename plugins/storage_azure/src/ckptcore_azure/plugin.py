"""Hooks of the Azure plugin. obstore and azure-identity are imported when a container is first used."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions

if TYPE_CHECKING:
    from ckptcore_azure.opening import AzureContainers

_SCHEMES: Final = ("abfs", "abfss", "az", "azure")


class AzurePlugin:
    """Opens ``az://container/directory``, and the spellings of Hadoop and fsspec. Thread-safe."""

    def __init__(self) -> None:
        """Initialise without opening a container."""
        self._containers: AzureContainers | None = None

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Openers by scheme."""
        return {scheme: partial(self._open, scheme) for scheme in _SCHEMES}

    def open(self, url: str, options: StorageOptions) -> StorageBackend:
        """Open a directory of a container. Makes no request."""
        return self._open(url.partition("://")[0].lower(), url, options)

    def _open(self, scheme: str, url: str, options: StorageOptions) -> StorageBackend:
        from ckptcore_azure.opening import AzureContainers

        if self._containers is None:
            self._containers = AzureContainers()
        return self._containers.open(scheme, url, options)


PLUGIN: Final = AzurePlugin()
"""The entry point. It keeps connections open while the process lives."""
