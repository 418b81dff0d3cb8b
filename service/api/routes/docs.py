"""/, /docs and /openapi.json: the description of the API. It needs no key and loads nothing from other sites."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from service.api.openapi import OpenApiApp

router = APIRouter(include_in_schema=False)
_READ = ["GET", "HEAD"]
_PIECE = 16 << 10
"""Bytes after which an answer waits until the client has read them: nothing else bounds unread answers in memory."""
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon.png": "image/png"}
_CACHED = "public, max-age=3600"


class CachedResponse(Response):
    """A response whose body all requests share."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body piece by piece."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), _PIECE):
            await send({"type": "http.response.body", "body": self.body[start : start + _PIECE], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.api_route("/", methods=_READ)
async def root() -> RedirectResponse:
    """Redirect to the API description."""
    return RedirectResponse("docs")


@router.api_route("/openapi.json", methods=_READ)
async def openapi(request: Request) -> CachedResponse:
    """Return the OpenAPI document."""
    app: OpenApiApp = request.app
    return CachedResponse(app.openapi_text, media_type="application/json")


@router.api_route("/docs", methods=_READ)
async def page() -> CachedResponse:
    """Return the page that shows the API description."""
    return CachedResponse(_page(), media_type="text/html; charset=utf-8")


@router.api_route("/docs/{name}", methods=_READ)
async def asset(name: str) -> CachedResponse:
    """Return a file of the page."""
    if name not in _ASSETS:
        raise HTTPException(404)
    return CachedResponse(_asset(name), headers={"Cache-Control": _CACHED}, media_type=_ASSETS[name])


@cache
def _page() -> bytes:
    # Relative addresses, so that the page also works below a prefix of a proxy.
    found = get_swagger_ui_html(
        title="Trainshed",
        openapi_url="openapi.json",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    return bytes(found.body)


@cache
def _asset(name: str) -> bytes:
    return files("fastapi_offline").joinpath("static", name).read_bytes()
