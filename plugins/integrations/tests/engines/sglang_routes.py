"""The real routes of SGLang, over models of `served_models`."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import sglang.srt.entrypoints.http_server as server

from plugins.integrations.tests.served_models import SGLangModel
from plugins.integrations.tests.uvicorn_servers import run


class Manager:
    """The part of SGLang's `TokenizerManager` that its routes call, over a model."""

    is_generation = True
    served_model_name = "model"
    initial_weights_loaded = True
    model_config = SimpleNamespace(
        is_image_understandable_model=False, is_audio_understandable_model=False, hf_config=SimpleNamespace()
    )

    def __init__(self, model: SGLangModel) -> None:
        self.model = model

    @property
    def model_path(self) -> str:
        return self.model.model_path

    def config_value(self, name: str) -> Any:
        return self.model.model_info()["weight_version"] if name == "weight_version" else None

    async def pause_generation(self, request: Any) -> None:
        assert request.mode in ("abort", "retract", "in_place")
        await asyncio.to_thread(self.model.pause)

    async def continue_generation(self, request: Any) -> None:
        await asyncio.to_thread(self.model.resume)

    async def update_weights_from_disk(self, request: Any, _: Any) -> tuple[bool, str, int]:
        assert request.load_format == "auto" and request.flush_cache and not request.abort_all_requests
        return await asyncio.to_thread(self.model.update_weights_from_disk, request.model_path, request.weight_version)

    async def update_weight_version(self, request: Any) -> None:
        assert not request.abort_all_requests
        await asyncio.to_thread(self.model.relabel, request.new_version)

    async def check_weights(self, request: Any, _: Any) -> tuple[bool, str, Sequence[Any], str]:
        assert request.action == "checksum"
        return await asyncio.to_thread(self.model.check_weights)


_MANAGER: contextvars.ContextVar[Manager] = contextvars.ContextVar("manager")


class _State:
    """The global state of SGLang's server: the manager of the server that received a request."""

    @property
    def tokenizer_manager(self) -> Manager:
        return _MANAGER.get()


@contextmanager
def serve_sglang(model: SGLangModel) -> Iterator[str]:
    """Serve a model with SGLang's routes."""
    manager = Manager(model)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        _MANAGER.set(manager)
        await server.app(scope, receive, send)

    server._global_state = _State()
    server.get_serving = lambda: SimpleNamespace(tokenizer_path="", preferred_sampling_params=None)
    with run(app) as url:
        yield url
