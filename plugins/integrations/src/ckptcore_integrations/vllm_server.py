"""vLLM over HTTP: installs versions of weights in a running server, whose workers read them from local files.

vLLM itself is not imported. The server needs `ckptcore_integrations`, and these options::

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "ckptcore"}'
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

from ckptcore_integrations.engine_server import ServerEngine
from ckptcore_integrations.engines import EngineError, EngineRefusedError

__all__ = ["VLLMEngine"]

_START: Final = (
    "start vLLM 0.27 or newer with VLLM_SERVER_DEV_MODE=1 and "
    """--weight-transfer-config '{"backend": "ckptcore"}', in an environment with ckptcore-integrations"""
)


class VLLMEngine(ServerEngine):
    """A server of vLLM whose workers have the directories of the versions.

    The workers replace their weights themselves: see `ckptcore_integrations.vllm_updates`.

    Attributes:
        name: its address.
        remedy: what to do if its weights may be a mixture of two versions.
    """

    remedy = f"Restart the server: after an error of a worker it cannot be used. If this is its first update: {_START}"

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        pause: Literal["abort", "wait", "keep"] = "wait",
        timeout: float = 1800.0,
    ) -> None:
        """Describe the server. Connects at the first request.

        Args:
            url: its address, such as ``http://localhost:8000``.
            api_key: the key of the server, if it has one.
            pause: what happens to running requests. ``"wait"``: they end before the install, and new requests are
                refused meanwhile. ``"abort"``: they end at once. ``"keep"``: they wait, and continue with the KV cache
                of the weights before; so do later requests with an equal beginning.
            timeout: the maximum time without an answer, in seconds. Neither a pause nor an install must take longer.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        if pause not in ("abort", "wait", "keep"):
            raise ValueError(f"pause={pause!r}: expected 'abort', 'wait' or 'keep'")
        super().__init__(url, api_key=api_key, timeout=timeout)
        self._pause = pause

    def pause(self) -> None:
        """See `Engine`."""
        self._post(f"/pause?mode={self._pause}")

    def relabel(self, label: str) -> None:
        """See `Engine`."""
        self._post("/update_weight_version", {"new_version": label})

    def install(self, directory: str, label: str) -> None:
        """See `Engine`."""
        self._post("/start_weight_update")
        try:
            self._post("/update_weights", {"update_info": {"directory": directory}})
            self._post("/finish_weight_update", {"weight_version": label})
        except EngineRefusedError as error:  # the update has begun
            raise EngineError(str(error)) from error

    def resume(self) -> None:
        """See `Engine`."""
        self._post("/resume")

    def label(self) -> str:
        """See `Engine`. A server that was started has the label ``default``."""
        try:
            answer = self._get("/weight_info")
        except EngineRefusedError as error:
            raise EngineRefusedError(f"{error}; {_START}") from error
        return self._text(answer, "weight_version")

    def checksum(self) -> str:
        """See `Engine`. Needs vLLM 0.32 or newer."""
        checksums = self._post("/weight_checker", {"action": "checksum"}).get("checksums")
        if not isinstance(checksums, dict) or not checksums:
            raise EngineError(f"{self.name}: the server has no checksums of its weights")
        total = hashlib.sha256()
        for name, checksum in sorted(checksums.items()):
            total.update(f"{name}={checksum}\n".encode())
        return total.hexdigest()
