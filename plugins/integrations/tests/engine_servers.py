"""Strict servers with the routes of SGLang and vLLM that this package calls. Each refuses everything else.

`make test-engines` compares the tables of routes with the packages, and runs the same tests with their real routes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from plugins.integrations.tests.served_models import SGLangModel, VLLMModel

Answer = tuple[int, Any]


class Request(NamedTuple):
    """A request that a server received.

    Attributes:
        method, path, query: of its first line.
        body: the JSON object; None if it has no content.
        headers: with names in lower case.
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any] | None
    headers: Mapping[str, str]


SGLANG_ROUTES: Mapping[tuple[str, str], Mapping[str, tuple[type, ...]]] = {
    ("GET", "/model_info"): {},
    ("POST", "/pause_generation"): {"mode": (str,)},
    ("POST", "/update_weights_from_disk"): {
        "model_path": (str,),
        "load_format": (str, type(None)),
        "weight_version": (str, type(None)),
        "flush_cache": (bool,),
    },
    ("POST", "/continue_generation"): {},
    ("POST", "/update_weight_version"): {"new_version": (str,), "abort_all_requests": (bool,)},
    ("POST", "/weights_checker"): {"action": (str,)},
}
"""By method and path, the fields of the JSON object, with their types."""

VLLM_ROUTES: Mapping[tuple[str, str], Mapping[str, tuple[type, ...]]] = {
    ("GET", "/weight_info"): {},
    ("POST", "/pause"): {},
    ("POST", "/start_weight_update"): {},
    ("POST", "/update_weights"): {"update_info": (dict,)},
    ("POST", "/finish_weight_update"): {"weight_version": (str,)},
    ("POST", "/resume"): {},
    ("POST", "/update_weight_version"): {"new_version": (str,)},
    ("POST", "/weight_checker"): {"action": (str,)},
}
"""The same, for vLLM."""


@contextmanager
def serve(answer: Callable[[Request], Answer]) -> Iterator[str]:
    """Run a server with a function that answers requests. Yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length)
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = json.loads(content) if content else None
            request = Request(self.command, parts.path, dict(parse_qsl(parts.query)), body, headers)
            try:
                status, value = answer(request)
            except Exception as error:  # noqa: BLE001  # a server answers after every error
                status, value = 500, {"error": repr(error)}
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client did not wait

        do_GET = do_POST = _handle

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _checked(
    request: Request, routes: Mapping[tuple[str, str], Mapping[str, tuple[type, ...]]], invalid: int
) -> Answer | None:
    """Return the refusal of a request that is not in a table of routes; None for a valid one."""
    fields = routes.get((request.method, request.path))
    if fields is None:
        return 404, {"detail": "Not Found"}
    body = request.body or {}
    if set(body) != set(fields) or not all(isinstance(body[name], types) for name, types in fields.items()):
        return invalid, {"detail": f"invalid: {sorted(body)}"}
    return None


def sglang_answer(model: SGLangModel, request: Request) -> Answer:
    """Answer as SGLang's server does."""
    if (refusal := _checked(request, SGLANG_ROUTES, 400)) is not None:
        return refusal
    body = request.body or {}
    match request.path:
        case "/model_info":
            return 200, model.model_info()
        case "/pause_generation":
            if body["mode"] not in ("abort", "retract", "in_place"):
                return 400, {"detail": "mode"}
            model.pause()
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        case "/continue_generation":
            model.resume()
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        case "/update_weight_version":
            assert not body["abort_all_requests"]
            model.relabel(body["new_version"])
            return 200, {"success": True, "new_version": model.label}
        case "/update_weights_from_disk":
            success, message, paused = model.update_weights_from_disk(body["model_path"], body["weight_version"])
            content = {"success": success, "message": message, "num_paused_requests": paused}
            return (200 if success else 400), content
        case _:
            success, message, ranks, total = model.check_weights()
            return 200, {"success": success, "message": message, "ranks": ranks, "per_engine_checksum": total}


def vllm_answer(model: VLLMModel, request: Request) -> Answer:
    """Answer as vLLM's server does."""
    if (refusal := _checked(request, VLLM_ROUTES, 422)) is not None:
        return refusal
    body = request.body or {}
    match request.path:
        case "/weight_info":
            return 200, {"weight_version": model.get_weight_version()}
        case "/pause":
            if request.query.get("mode") not in ("abort", "wait", "keep"):
                return 422, {"detail": "mode"}
            model.pause()
            return 200, {"status": "paused"}
        case "/start_weight_update":
            model.start_weight_update()
            return 200, {"message": "Weight update started"}
        case "/update_weights":
            model.update_weights(body["update_info"])
            return 200, {"message": "Weights updated"}
        case "/finish_weight_update":
            model.finish_weight_update(body["weight_version"])
            return 200, {"message": "Weight update finished"}
        case "/resume":
            model.resume()
            return 200, {"status": "resumed"}
        case "/update_weight_version":
            model.relabel(body["new_version"])
            return 200, {"success": True, "new_version": model.label}
        case _:
            checksums: dict[str, str] = {}
            for of_worker in model.compute_weight_checksums():
                checksums.update(of_worker)
            return 200, {"checksums": checksums}
