"""SGLang: installs versions of weights in a running server, over HTTP.

SGLang itself is not imported.
"""

from __future__ import annotations

import errno
import os
from typing import Literal

from ckptcore_integrations.engine_server import ServerEngine
from ckptcore_integrations.engines import EngineError, EngineRefusedError

__all__ = ["SGLangEngine"]


class SGLangEngine(ServerEngine):
    """A server of SGLang, on a host that has the directories of the versions.

    Attributes:
        name: its address.
        remedy: what to do if its weights may be a mixture of two versions.
    """

    remedy = "Install a version again, which replaces all weights, or restart the server"

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        pause: Literal["abort", "retract", "in_place"] = "retract",
        load_format: str = "auto",
        link: str | os.PathLike[str] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Describe the server. Connects at the first request.

        Args:
            url: its address, such as ``http://localhost:30000``.
            api_key: the key of an administrator, if the server has one.
            pause: what happens to running requests. ``"retract"``: they wait, and then continue with the new weights;
                what they generated is computed again with these. ``"abort"``: they end. ``"in_place"``: they continue
                with the KV cache of the weights before, and so do later requests with an equal beginning.
            load_format: how the server reads the files; see its option ``--load-format``. It is sent each time, because
                a server that was started with ``dummy`` would install random weights.
            link: a symbolic link, which is pointed at each version before it is installed. The server then reports it
                as the path and the name of the model. None: it reports the directory of the version.
            timeout: the maximum time without an answer, in seconds. An install must not take longer.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        if pause not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause={pause!r}: expected 'abort', 'retract' or 'in_place'")
        super().__init__(url, api_key=api_key, timeout=timeout)
        self._pause = pause
        self._load_format = load_format
        self._link = None if link is None else os.path.abspath(os.fspath(link))

    def pause(self) -> None:
        """See `Engine`."""
        self._post("/pause_generation", {"mode": self._pause})

    def relabel(self, label: str) -> None:
        """See `Engine`."""
        self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def install(self, directory: str, label: str) -> None:
        """See `Engine`."""
        path = directory
        if self._link is not None:
            _point(self._link, directory)
            path = self._link
        answer = self._post(
            "/update_weights_from_disk",
            {
                "model_path": path,
                "load_format": self._load_format,
                "weight_version": label,
                # SGLang cannot empty the cache while requests use it.
                "flush_cache": self._pause != "in_place",
            },
        )
        if answer.get("success") is not True:
            raise EngineError(f"{self.name}: the install failed: {answer.get('message')!r}")

    def resume(self) -> None:
        """See `Engine`."""
        self._post("/continue_generation", {})

    def label(self) -> str:
        """See `Engine`. A server that was started without a label has the label ``default``."""
        return self._text(self._get("/model_info"), "weight_version")

    def checksum(self) -> str:
        """See `Engine`."""
        return self._text(self._post("/weights_checker", {"action": "checksum"}), "per_engine_checksum")


def _point(link: str, directory: str) -> None:
    """Point a symbolic link at a directory, by one rename.

    Raises:
        EngineRefusedError: the link cannot be written, or a file or directory has its name.
    """
    made = f"{link}.{os.urandom(8).hex()}"
    try:
        if os.path.lexists(link) and not os.path.islink(link):
            raise FileExistsError(errno.EEXIST, "expected a symbolic link, found a file or a directory", link)
        os.symlink(directory, made)
        try:
            os.replace(made, link)
        except OSError:
            os.unlink(made)
            raise
    except OSError as error:
        raise EngineRefusedError(f"{link} cannot be pointed at {directory}: {error}") from error
