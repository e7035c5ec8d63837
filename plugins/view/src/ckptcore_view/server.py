"""The server of the page: an ASGI application on 127.0.0.1, with a secret token in its URL.

Only programs that know the URL can read the checkpoint. Requests must name this machine as their host, so
that no web site can reach the server under its own host name. The page loads nothing from other hosts.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Final, Self

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from ckptcore.events import logger_named
from ckptcore.redaction import redacted
from ckptcore_view.assets import MODULES, import_map, page_file, page_html
from ckptcore_view.documents import BadRequestError, CancelledError, Document, Request, document_of
from ckptcore_view.viewed import Viewed

_logger = logger_named("ckptcore.view")

_HOST: Final = "127.0.0.1"
_SHUTDOWN_SECONDS: Final = 5
"""Seconds to wait for running reads at the end of the server. Reads stop between two boxes of an array."""

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response. No referrer, because it would show the token to other sites."""


def _content_policy(nonce: str) -> str:
    """Return the content security policy, which allows only content of this server."""
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def application(viewed: Viewed, token: str, is_closing: Callable[[], bool] = lambda: False) -> Starlette:
    """Return the application that serves the page and its documents below ``/TOKEN/``.

    Args:
        viewed: the subject of the page.
        token: the secret part of the URL.
        is_closing: returns True if the server is closing, to stop reads.
    """

    def authorized(serve: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def guarded(request: HttpRequest) -> Response:
            if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
                return PlainTextResponse("not found", 404, _HEADERS)
            return await serve(request)

        return guarded

    async def page(_: HttpRequest) -> Response:
        nonce = secrets.token_urlsafe(16)
        html = page_html(
            imports=import_map({name: f"./{name}.js" for name in MODULES}),
            style='<link rel="stylesheet" href="style.css">',
            data="",
            nonce=nonce,
        )
        headers = {**_HEADERS, "Content-Security-Policy": _content_policy(nonce)}
        return Response(html, media_type="text/html", headers=headers)

    async def file(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name == "style.css":
            text, media_type = page_file(name), "text/css"
        elif name.endswith(".js") and name[:-3] in MODULES:
            text, media_type = page_file(name), "text/javascript"
        else:
            return PlainTextResponse("not found", 404, _HEADERS)
        return Response(text, media_type=media_type, headers=_HEADERS)

    async def document(request: HttpRequest) -> Response:
        name, parameters = request.path_params["name"], dict(request.query_params)

        def work(has_left: Callable[[], bool]) -> tuple[bytes, int]:
            return _document(viewed, name, Request(parameters, lambda: has_left() or is_closing()))

        body, status = await _while_connected(request, work)
        return Response(body, status, _HEADERS, "application/json")

    return Starlette(
        routes=[
            Route("/{token}/", authorized(page)),
            Route("/{token}/documents/{name}", authorized(document)),
            Route("/{token}/{name}", authorized(file)),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])],
    )


def _document(viewed: Viewed, name: str, request: Request) -> tuple[bytes, int]:
    """Return a document, or an error as a document, as JSON, and its HTTP status."""
    try:
        return _json(document_of(viewed, name, request)), 200
    except CancelledError:
        return _json({"error": "cancelled"}), 499
    except BadRequestError as error:
        return _json({"error": redacted(str(error))}), 400
    except CheckpointNotFoundError as error:
        return _json({"error": redacted(str(error))}), 404
    except (CheckpointError, OSError, MemoryError) as error:
        return _json({"error": redacted(str(error) or type(error).__name__)}), 500
    except Exception as error:
        _logger.exception("cannot make the document %s", name)
        text = redacted(f"{type(error).__name__}: {error}")
        return _json({"error": f"{text}. This is a bug in ckptcore: please report it"}), 500


def _json(document: Document) -> bytes:
    """Return JSON in ASCII, because names may have characters that UTF-8 cannot encode."""
    return json.dumps(document, allow_nan=False).encode("ascii")


async def _while_connected(
    request: HttpRequest, work: Callable[[Callable[[], bool]], tuple[bytes, int]]
) -> tuple[bytes, int]:
    """Call a function on a thread. Its argument is a function that returns True once the client has disconnected."""
    left = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        result = await anyio.to_thread.run_sync(work, left.is_set)
        tasks.cancel_scope.cancel()
    return result


class ViewServer:
    """A server that answers during `run`, or in a ``with`` statement. Use it only once.

    Attributes:
        url: the address of the page, with the token.
    """

    def __init__(self, viewed: Viewed, *, port: int = 0) -> None:
        """Bind to a port of 127.0.0.1; 0 for a free one.

        Raises:
            OSError: the port is in use.
        """
        token = secrets.token_urlsafe(24)
        self._socket = socket.create_server((_HOST, port))
        self.url = f"http://{_HOST}:{self._socket.getsockname()[1]}/{token}/"
        settings = uvicorn.Config(
            application(viewed, token, lambda: self._server.should_exit),
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(settings)

    def run(self) -> None:
        """Serve until the program is interrupted."""
        with self._socket:  # an older Uvicorn does not always close it
            self._server.run(sockets=[self._socket])

    def __enter__(self) -> Self:
        """Serve on a thread."""
        self._thread = threading.Thread(target=self.run, name="ckptcore-view", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and wait until the server has stopped."""
        self._server.should_exit = True
        self._thread.join()
