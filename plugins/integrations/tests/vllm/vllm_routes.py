"""The real routes of vLLM, over models of `served_models`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from vllm.entrypoints.rl.online.api_router import router

from plugins.integrations.tests.served_models import VLLMModel
from plugins.integrations.tests.uvicorn_servers import run


class Client:
    """The part of vLLM's `EngineClient` that its routes call, over a model."""

    def __init__(self, model: VLLMModel) -> None:
        self.model = model

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode in ("abort", "wait", "keep")
        await asyncio.to_thread(self.model.pause)

    async def resume_generation(self) -> None:
        await asyncio.to_thread(self.model.resume)

    async def start_weight_update(self) -> None:
        await asyncio.to_thread(self.model.start_weight_update)

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self.model.update_weights, request.update_info)

    async def finish_weight_update(self, weight_version: str | None) -> None:
        await asyncio.to_thread(self.model.finish_weight_update, weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        await asyncio.to_thread(self.model.relabel, new_version)

    async def get_weight_version(self) -> str | None:
        return await asyncio.to_thread(self.model.get_weight_version)

    async def compute_weight_checksums(self) -> Sequence[dict[str, str]]:
        return await asyncio.to_thread(self.model.compute_weight_checksums)


@contextmanager
def serve_vllm(model: VLLMModel) -> Iterator[str]:
    """Serve a model with vLLM's routes."""
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = Client(model)
    with run(app) as url:
        yield url
