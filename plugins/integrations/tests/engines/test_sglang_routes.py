"""The tests of installs, with the real routes of SGLang, and the table of its strict server.

`make test-engines` runs these tests in an environment with the package.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
import sglang.srt.entrypoints.http_server as server
from sglang.srt.managers import io_struct
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from plugins.integrations.tests.engine_servers import SGLANG_ROUTES
from plugins.integrations.tests.engines.sglang_routes import Manager, serve_sglang
from plugins.integrations.tests.served_models import SGLangModel
from plugins.integrations.tests.test_engines import TestSGLang as SGLangTests

REQUESTS: Final = {
    "/pause_generation": io_struct.PauseGenerationReqInput,
    "/update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput,
    "/continue_generation": io_struct.ContinueGenerationReqInput,
    "/update_weight_version": io_struct.UpdateWeightVersionReqInput,
    "/weights_checker": io_struct.CheckWeightsReqInput,
}


class TestSGLangRoutes(SGLangTests):
    """SGLang's routes."""

    def serve(self, model: SGLangModel) -> AbstractContextManager[str]:
        return serve_sglang(model)


def test_the_strict_server_has_the_routes_and_fields_of_sglang() -> None:
    real = {(method, route.path) for route in server.app.routes for method in getattr(route, "methods", ())}
    assert SGLANG_ROUTES.keys() <= real
    for (_, path), fields in SGLANG_ROUTES.items():
        if path in REQUESTS:
            assert set(fields) <= {field.name for field in msgspec.structs.fields(REQUESTS[path])}


def parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def test_the_manager_of_these_tests_has_methods_of_sglang() -> None:
    for name, method in inspect.getmembers(Manager, inspect.iscoroutinefunction):
        assert len(parameters(method)) == len(parameters(getattr(TokenizerManager, name))), name
