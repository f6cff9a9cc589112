"""The routes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from octavo.errors import OctavoError
from octavo.server import protocol, refused, tokenize
from octavo.server.auth import KeyRing
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.docs import render_docs
from octavo.server.embeddings import embeddings
from octavo.server.errors import ApiError, internal_error
from octavo.server.limits import read_body
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.middleware import App, Gate
from octavo.server.parse import Parsed, T, parse_request
from octavo.server.replies import explain
from octavo.server.state import ServerState
from octavo.version import __version__

_UNSUPPORTED = {
    protocol.ChatCompletionRequest: refused.CHAT,
    protocol.CompletionRequest: refused.COMPLETION,
    protocol.EmbeddingRequest: refused.EMBEDDING,
    protocol.TokenizeRequest: refused.TOKENIZE,
    protocol.DetokenizeRequest: refused.DETOKENIZE,
}
_SCHEMA_PREFIX = "#/components/schemas/{name}"


def build_app(state: ServerState) -> App:
    """The ASGI application of one server."""
    api = FastAPI(
        title="Octavo",
        version=__version__,
        description="An OpenAI-compatible server.",
        docs_url=None,
        redoc_url=None,
        root_path=state.config.root_path,
    )
    _add_generation(api, state)
    _add_tokens(api, state)
    _add_status(api, state)
    _add_errors(api)
    _describe_bodies(api)
    app: App = Gate(api, KeyRing(state.config.api_key, protect_metrics=state.config.protect_metrics), state.metrics)
    if state.config.allowed_origins:
        # Outside the gate: a browser's preflight request carries no key.
        app = CORSMiddleware(app, allow_origins=state.config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return app


async def _parse(state: ServerState, request: Request, kind: type[T]) -> Parsed[T]:
    body = await read_body(request.receive, request.headers.get("content-length"), state.config.max_body_bytes)
    return parse_request(body, kind, _UNSUPPORTED[kind], strict=state.config.strict_params)


def _body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What OpenAPI says about a route's body, which the route reads itself."""
    schema = {"$ref": _SCHEMA_PREFIX.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_generation(api: FastAPI, state: ServerState) -> None:
    @api.post("/v1/chat/completions", openapi_extra=_body(protocol.ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        state.need_generation("/v1/chat/completions")
        parsed = await _parse(state, request, protocol.ChatCompletionRequest)
        return await chat_completions(state, parsed, request.state.request_id)

    @api.post("/v1/completions", openapi_extra=_body(protocol.CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        state.need_generation("/v1/completions")
        parsed = await _parse(state, request, protocol.CompletionRequest)
        return await completions(state, parsed, request.state.request_id)

    @api.post("/v1/embeddings", openapi_extra=_body(protocol.EmbeddingRequest))
    async def create_embeddings(request: Request) -> Response:
        """Vectors of one or more inputs, given as text or token ids."""
        parsed = await _parse(state, request, protocol.EmbeddingRequest)
        return await embeddings(state, parsed, request.state.request_id)

    @api.get("/v1/models")
    async def list_models() -> Response:
        """The names under which the model is served."""
        return JSONResponse({"object": "list", "data": [_model_card(state, name) for name in state.model_names]})

    @api.get("/v1/models/{model:path}")
    async def show_model(model: str) -> Response:
        """One of the names."""
        return JSONResponse(_model_card(state, state.check_model(model)))


def _add_tokens(api: FastAPI, state: ServerState) -> None:
    @api.post("/tokenize", openapi_extra=_body(protocol.TokenizeRequest))
    async def to_tokens(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        parsed = await _parse(state, request, protocol.TokenizeRequest)
        return JSONResponse(await tokenize.tokenize(state, parsed.request), headers=parsed.headers())

    @api.post("/detokenize", openapi_extra=_body(protocol.DetokenizeRequest))
    async def to_text(request: Request) -> Response:
        """Text of token ids."""
        parsed = await _parse(state, request, protocol.DetokenizeRequest)
        return JSONResponse(tokenize.detokenize(state, parsed.request), headers=parsed.headers())

    @api.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens, vocabulary size and chat template."""
        return JSONResponse(tokenize.tokenizer_info(state))

    @api.post("/v1/chat/completions/render", openapi_extra=_body(protocol.ChatCompletionRequest))
    async def render_chat(request: Request) -> Response:
        """The tokens that a chat request would send to the engine."""
        parsed = await _parse(state, request, protocol.ChatCompletionRequest)
        content = await tokenize.render_chat_request(state, parsed, request.state.request_id)
        return JSONResponse(content, headers=parsed.headers())

    @api.post("/v1/completions/render", openapi_extra=_body(protocol.CompletionRequest))
    async def render_completion(request: Request) -> Response:
        """The tokens that a completion request would send to the engine, one object a prompt."""
        parsed = await _parse(state, request, protocol.CompletionRequest)
        content = await tokenize.render_completion_request(state, parsed, request.state.request_id)
        return JSONResponse(content, headers=parsed.headers())


def _add_status(api: FastAPI, state: ServerState) -> None:
    @api.get("/health")
    @api.get("/ping")
    @api.post("/ping")
    async def health() -> Response:
        """200 while the engine works; 503 when it died, or when it has work and nothing moves."""
        if state.client.is_alive:
            return Response(status_code=200)
        return ApiError(503, "the engine died or does not move; restart the server").response()

    @api.get("/version")
    async def version() -> Response:
        """Octavo's version."""
        return JSONResponse({"version": __version__})

    @api.get("/load")
    async def load() -> Response:
        """Sequences that run or wait."""
        return JSONResponse({"server_load": state.admission.in_flight})

    @api.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @api.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(render_docs(api.openapi()))


def _add_errors(api: FastAPI) -> None:
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: f"there is no route {request.url.path[:200]!r}; /docs lists them"}
        known[405] = f"the route {request.url.path[:200]!r} does not take {request.method}"
        message = known.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    async def on_error(request: Request, error: Exception) -> Response:
        return explain(error).response()

    async def on_bug(request: Request, error: Exception) -> Response:
        return internal_error(error).response()  # uvicorn logs the traceback

    api.add_exception_handler(HTTPException, on_http_error)
    api.add_exception_handler(ApiError, on_error)
    api.add_exception_handler(OctavoError, on_error)
    api.add_exception_handler(Exception, on_bug)


def _describe_bodies(api: FastAPI) -> None:
    """Add the request types to the OpenAPI document, since the routes read bodies themselves."""
    _, components = msgspec.json.schema_components(list(_UNSUPPORTED), ref_template=_SCHEMA_PREFIX)
    generate = api.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    api.openapi = openapi  # type: ignore[method-assign]


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "octavo",
        "root": state.client.info.model,
        "parent": None,
        "max_model_len": state.params.max_model_len,
        "permission": [],
    }
