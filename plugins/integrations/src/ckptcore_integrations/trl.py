"""TRL: a weight transfer for `AsyncGRPOTrainer` that publishes versions of weights.

Pass it as ``weight_transfer=``. Programs on the hosts of the servers follow the versions, and install them with
`ckptcore_integrations.engines.install`. TRL itself is not imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from ckptcore_versions import Publisher

from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.events import logger_named
from ckptcore_integrations.engine_server import seconds_of
from ckptcore_integrations.engines import Engine, EngineError

__all__ = ["VersionTransfer"]

logger = logger_named("ckptcore.integrations.trl")

_ALONE: Final = Context(job=JobOptions(coordinator=SingleProcess()))
"""Options of the main process, which publishes alone, though it may belong to a job of several processes."""

_POLL_SECONDS: Final = 0.2


class VersionTransfer:
    """Publishes the weights of the trainer, and waits until every server has them.

    The trainer calls it in its main process. TRL counts a new version of the model, and asks for samples of it, only
    when every server has the label of the version. It needs host memory for two copies of the weights.
    """

    def __init__(
        self, location: str | os.PathLike[str], engines: Sequence[Engine], *, timeout: float = 1800.0, **options: Any
    ) -> None:
        """Describe the transfer. Opens nothing, so that every process of a job may create it.

        Args:
            location: a path or URL of the directory of versions.
            engines: the servers. Their labels are the numbers of the versions.
            timeout: the maximum time until all servers have a version, in seconds.
            **options: options of `ckptcore_versions.Publisher`, such as ``keep``.
        """
        self._location = location
        self._engines = tuple(engines)
        self._timeout = seconds_of("timeout", timeout)
        self._options = {"context": _ALONE, **options}
        self._publisher: Publisher | None = None

    def init_weight_transfer(self) -> None:
        """Own the directory of versions.

        Raises:
            DirectoryInUseError: another trainer owns it.
        """
        self._publisher = Publisher(self._location, **self._options)

    def pause(self) -> None:
        """Do nothing: a server generates until it has prepared the version, and is paused by what installs it."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish weights as the next version.

        Raises:
            The errors of `ckptcore_versions.Publisher.publish`.
        """
        publisher = self._opened()
        # A copy also of tensors in host memory, because the iterator may use their memory for the next one.
        arrays = {name: weight.detach().to("cpu", copy=True) for name, weight in iterator}
        publisher.publish(1 if publisher.latest is None else publisher.latest + 1, arrays)

    def resume(self) -> None:
        """Wait until every server has the version.

        Raises:
            EngineError: a server did not have it in time.
        """
        label = str(self._opened().latest)
        end = time.monotonic() + self._timeout
        waiting = list(self._engines)
        while waiting:
            engine = waiting[0]
            held = _label(engine)
            if held == label:
                waiting.pop(0)
            elif time.monotonic() >= end:
                raise EngineError(
                    f"{engine.name} has the label {held!r} {self._timeout:g} s after version {label} was published in "
                    f"{self._opened().directory}: check the program that follows the versions and installs them"
                )
            else:
                time.sleep(_POLL_SECONDS)

    def destroy(self) -> None:
        """Release the directory of versions."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _opened(self) -> Publisher:
        if self._publisher is None:
            raise RuntimeError("call init_weight_transfer first, as AsyncGRPOTrainer does")
        return self._publisher


def _label(engine: Engine) -> str | None:
    """Return the label of a server; None while it does not answer, such as while it restarts."""
    try:
        return engine.label()
    except EngineError as error:
        logger.info("%s has no label yet: %s", engine.name, error)
        return None
