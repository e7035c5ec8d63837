"""The tests of installs, with the real routes of vLLM, and the table of its strict server."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.rl.online.api_router import router

from plugins.integrations.tests.engine_servers import VLLM_ROUTES
from plugins.integrations.tests.served_models import VLLMModel
from plugins.integrations.tests.test_engines import TestVLLM as VLLMTests
from plugins.integrations.tests.vllm.vllm_routes import Client, serve_vllm


class TestVLLMRoutes(VLLMTests):
    """vLLM's routes."""

    def serve(self, model: VLLMModel) -> AbstractContextManager[str]:
        return serve_vllm(model)


def parameters(method: Any) -> set[str]:
    return set(inspect.signature(method).parameters)


def test_the_strict_server_has_the_routes_and_fields_of_vllm() -> None:
    real: dict[Any, Any] = {(method, route.path): route.endpoint for route in router.routes for method in route.methods}
    for key, fields in VLLM_ROUTES.items():
        assert set(fields) <= parameters(real[key]), key
    assert "mode" in parameters(real["POST", "/pause"])


def test_the_client_of_these_tests_has_methods_of_vllm() -> None:
    for name, method in inspect.getmembers(Client, inspect.iscoroutinefunction):
        assert parameters(method) <= parameters(getattr(EngineClient, name)), name
