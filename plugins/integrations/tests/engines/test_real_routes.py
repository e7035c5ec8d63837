"""The tests of installs, with the real routes of SGLang and vLLM, and the tables of the strict servers.

`make test-engines` runs these tests in an environment with the packages.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import sglang.srt.entrypoints.http_server as sglang_server
from sglang.srt.managers import io_struct
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.rl.online.api_router import router as vllm_router

from plugins.integrations.tests.engine_servers import SGLANG_ROUTES, VLLM_ROUTES
from plugins.integrations.tests.engines.real_routes import Client, Manager, serve_sglang, serve_vllm
from plugins.integrations.tests.served_models import SGLangModel, VLLMModel
from plugins.integrations.tests.test_engines import TestSGLang as SGLangTests
from plugins.integrations.tests.test_engines import TestVLLM as VLLMTests


class TestSGLangRoutes(SGLangTests):
    """SGLang's routes."""

    def serve(self, model: SGLangModel) -> AbstractContextManager[str]:
        return serve_sglang(model)


class TestVLLMRoutes(VLLMTests):
    """vLLM's routes."""

    def serve(self, model: VLLMModel) -> AbstractContextManager[str]:
        return serve_vllm(model)


def routes(of: Any) -> Mapping[tuple[str, str], Any]:
    """Return the functions of routes, by method and path."""
    return {(method, route.path): route.endpoint for route in of.routes for method in getattr(route, "methods", ())}


SGLANG_REQUESTS = {
    "/pause_generation": io_struct.PauseGenerationReqInput,
    "/update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput,
    "/continue_generation": io_struct.ContinueGenerationReqInput,
    "/weights_checker": io_struct.CheckWeightsReqInput,
}


def test_the_strict_server_of_sglang_has_its_routes_and_fields() -> None:
    real = routes(sglang_server.app)
    for (method, path), fields in SGLANG_ROUTES.items():
        assert (method, path) in real
        if path in SGLANG_REQUESTS:
            assert set(fields) <= {field.name for field in msgspec.structs.fields(SGLANG_REQUESTS[path])}


def test_the_strict_server_of_vllm_has_its_routes_and_fields() -> None:
    real = routes(vllm_router)
    for (method, path), fields in VLLM_ROUTES.items():
        assert set(fields) <= set(inspect.signature(real[method, path]).parameters)
    assert "mode" in inspect.signature(real["POST", "/pause"]).parameters


def parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def test_the_managers_of_these_tests_have_the_methods_of_the_packages() -> None:
    for name, method in inspect.getmembers(Manager, inspect.iscoroutinefunction):
        assert len(parameters(method)) <= len(parameters(getattr(TokenizerManager, name))), name
    for name, method in inspect.getmembers(Client, inspect.iscoroutinefunction):
        real = getattr(EngineClient, name)
        assert set(parameters(method)) <= set(parameters(real)), (name, typing.get_type_hints(real))
