"""The real routes of SGLang and vLLM, in a server of uvicorn, over models of `served_models`."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import sglang.srt.entrypoints.http_server as sglang_server
import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.rl.online.api_router import router as vllm_router

from plugins.integrations.tests.served_models import SGLangModel, VLLMModel


@contextmanager
def run(app: Any) -> Iterator[str]:
    """Run an application in a thread. Yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


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
        await sglang_server.app(scope, receive, send)

    sglang_server._global_state = _State()  # type: ignore[assignment]
    sglang_server.get_serving = lambda: SimpleNamespace(tokenizer_path="", preferred_sampling_params=None)
    with run(app) as url:
        yield url


class Client:
    """The part of vLLM's `EngineClient` that its routes call, over a model."""

    def __init__(self, model: VLLMModel) -> None:
        self.model = model

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode in ("abort", "wait", "keep")
        await asyncio.to_thread(self.model.pause)

    async def resume_generation(self) -> None:
        await asyncio.to_thread(self.model.resume)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await asyncio.to_thread(self.model.init_weight_transfer_engine, request.init_info)

    async def start_weight_update(self) -> None:
        await asyncio.to_thread(self.model.start_weight_update)

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self.model.update_weights, request.update_info)

    async def finish_weight_update(self, weight_version: str | None) -> None:
        await asyncio.to_thread(self.model.finish_weight_update, weight_version)

    async def get_weight_version(self) -> str | None:
        return await asyncio.to_thread(self.model.get_weight_version)

    async def compute_weight_checksums(self) -> Sequence[dict[str, str]]:
        return await asyncio.to_thread(self.model.compute_weight_checksums)


@contextmanager
def serve_vllm(model: VLLMModel) -> Iterator[str]:
    """Serve a model with vLLM's routes."""
    app = FastAPI()
    app.include_router(vllm_router)
    app.state.engine_client = Client(model)
    with run(app) as url:
        yield url
