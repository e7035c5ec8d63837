"""Models that a server serves in tests: each array of a version has its number, so that a mixture is noticed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import ckptcore

NAMES = ("layers.0.weight", "layers.1.weight", "layers.2.weight")


def weights(number: int) -> dict[str, Any]:
    """Return the weights of a version: every element is its number."""
    return {name: np.full((6, 8), number, np.float32) for name in NAMES}


class ServedModel:
    """A model that generates for many threads, with the behaviour that SGLang and vLLM have in common.

    Attributes:
        label: the label of its weights.
        paused: True if generation is paused.
        hooks: by operation ("pause", "relabel", "start", "install", "finish", "resume" and "label"), functions to
            call once, before it. An exception of one becomes an error of the server.
    """

    def __init__(self) -> None:
        """Serve the weights of version 0, as after a start of the server."""
        self.hooks: dict[str, list[Callable[[], object]]] = {}
        self._changed = threading.Condition()
        self._running = 0
        self.restart()

    def restart(self) -> None:
        """Serve the weights of version 0 again, as a server that was restarted."""
        with self._changed:
            self.weights = weights(0)
            self.label: str | None = "default"
            self.paused = False
            self._changed.notify_all()

    def hook(self, operation: str, *functions: Callable[[], object]) -> None:
        """Call functions before the next operations of a kind: each before one of them."""
        self.hooks.setdefault(operation, []).extend(functions)

    def run_hook(self, operation: str) -> None:
        """Call the next function for an operation."""
        waiting = self.hooks.get(operation, [])
        if waiting:
            waiting.pop(0)()

    @contextmanager
    def _request(self) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: not self.paused, timeout=60), "generation stays paused"
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def generate(self) -> dict[str, Any]:
        """Return the label, and the numbers of the versions of which it has elements. Waits while it is paused."""
        with self._request():
            numbers = sorted({int(element) for array in self.weights.values() for element in array.flat})
            return {"numbers": numbers, "label": self.label}

    def pause(self) -> None:
        """Pause, once no request is running."""
        self.run_hook("pause")
        with self._changed:
            self.paused = True
            assert self._changed.wait_for(lambda: not self._running, timeout=60)

    def relabel(self, label: str) -> None:
        """Change only the label."""
        self.run_hook("relabel")
        self.label = label

    def resume(self) -> None:
        """Continue."""
        self.run_hook("resume")
        with self._changed:
            self.paused = False
            self._changed.notify_all()

    def install(self, directory: str) -> None:
        """Copy array by array. The hook "install" is called before the second one."""
        with ckptcore.open(directory) as tree:
            for number, name in enumerate(NAMES):
                if number == 1:
                    self.run_hook("install")
                self.weights[name][...] = tree[name][:]

    def checksums(self) -> dict[str, str]:
        """Return a checksum of each array."""
        return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in self.weights.items()}


class SGLangModel(ServedModel):
    """The `TokenizerManager` of SGLang 0.5.23, as far as the routes of its server call it, without coroutines."""

    def __init__(self) -> None:
        """Serve the weights of version 0."""
        super().__init__()
        self.model_path = "/models/first"
        self.requests: list[dict[str, Any]] = []

    def update_weights_from_disk(self, model_path: str, weight_version: str | None) -> tuple[bool, str, int]:
        """Install, and label. Return if it succeeded, a message, and a number of requests."""
        try:
            self.install(model_path)
        except Exception as error:  # noqa: BLE001  # as SGLang does
            return False, f"Failed to update weights: {error}.\nRolling back to original weights.", 0
        self.model_path = model_path
        if weight_version is not None:
            self.label = weight_version
        self.run_hook("finish")
        return True, "Succeeded to update model weights.", 0

    def check_weights(self) -> tuple[bool, str, Sequence[Any], str]:
        """Return the checksums: of the rank, and of the engine."""
        checksums = self.checksums()
        total = hashlib.sha256("".join(checksums.values()).encode()).hexdigest()
        return True, "Success", [{"checksums": checksums, "per_gpu_checksum": total}], total

    def model_info(self) -> dict[str, Any]:
        """Return what ``/model_info`` answers."""
        self.run_hook("label")
        return {"model_path": self.model_path, "weight_version": self.label}


class VLLMModel(ServedModel):
    """The `EngineClient` of vLLM, as far as the routes of its server call it, without coroutines.

    It refuses as its workers do with the engine of `ckptcore_integrations.vllm_updates`.
    """

    def restart(self) -> None:
        """See `ServedModel`."""
        self.is_active, self.is_undefined = False, False
        super().restart()

    def start_weight_update(self) -> None:
        """Begin."""
        self.run_hook("start")
        if self.is_undefined:
            raise RuntimeError("an update of weights failed in this worker")
        if self.is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Install."""
        if not self.is_active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.install(update_info["directory"])
        except BaseException:
            self.is_active, self.is_undefined = False, True
            raise

    def finish_weight_update(self, weight_version: str | None) -> None:
        """Label."""
        if not self.is_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.is_active = False
        self.label = weight_version
        self.run_hook("finish")

    def get_weight_version(self) -> str | None:
        """Return the label."""
        self.run_hook("label")
        return self.label

    def compute_weight_checksums(self) -> Sequence[dict[str, str]]:
        """Return the checksums of each worker."""
        return [{f"dp0:pp0:pcp0:tp0:{name}": checksum for name, checksum in self.checksums().items()}]
