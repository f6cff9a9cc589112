"""`/v1/embeddings`: vectors of texts or token ids, as OpenAI's clients ask for them."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.engine.embedding import EmbeddingInputs, check_dimensions, cut, embedding_request
from octavo.engine.messages import EngineOutput
from octavo.errors import OctavoError
from octavo.server.completions import list_prompts
from octavo.server.errors import ApiError, bad_request
from octavo.server.parse import Parsed, shown
from octavo.server.protocol import EmbeddingRequest
from octavo.server.replies import JsonReply, LateReply
from octavo.server.state import ServerState
from octavo.server.tokens import LONG_TEXT_CHARS

ENCODINGS = ("float", "base64")


async def embeddings(state: ServerState, parsed: Parsed[EmbeddingRequest], request_id: str) -> LateReply:
    """Answer an embedding request. What is wrong with it is raised here, before anything is queued."""
    request, info = parsed.request, state.client.info
    model = state.check_model(request.model)
    if info.embedding is None:
        raise ApiError(400, f"the model {model!r} is served without embeddings (--runner generate)", "model")
    encoding = request.encoding_format or "float"
    if encoding not in ENCODINGS:
        raise bad_request(f"encoding_format is {shown(encoding)}; it must be 'float' or 'base64'", "encoding_format")
    check_dimensions(request.dimensions, info.embedding, model)
    inputs = await encode_inputs(state, request)
    return JsonReply(_answer(state, request, model, inputs, request_id), parsed.headers())


async def encode_inputs(state: ServerState, request: EmbeddingRequest) -> list[list[int]]:
    """The inputs in tokens, cut if that is asked for; ApiError 400 or UserError names what is wrong with which."""
    items = list_prompts(request.input, "input")
    limit = state.config.max_prompts
    if len(items) > limit:
        raise bad_request(
            f"input has {len(items)} inputs; at most {limit} are allowed in a request (--max-prompts)", "input"
        )
    state.admission.check(len(items))
    tokenizer = None if state.codec is None else state.codec.tokenizer
    encoder = EmbeddingInputs(state.client.info, tokenizer)
    texts = [item for item in items if isinstance(item, str)]
    encoded = iter(await _encode(encoder, texts, request.prompt_name) if texts else [])
    fitted = []
    for i, item in enumerate(items):
        where = "input" if len(items) == 1 else f"input[{i}]"
        is_text = isinstance(item, str)
        ids = next(encoded) if isinstance(item, str) else item
        keep, side = request.truncate_prompt_tokens, request.truncation_side
        fitted.append(encoder.fit(ids, keep, where, is_text=is_text, side=side))
    return fitted


async def _encode(encoder: EmbeddingInputs, texts: list[str], prompt_name: str | None) -> list[list[int]]:
    """Many or long texts are tokenized in a thread, so that other requests do not wait for them."""
    if sum(map(len, texts)) < LONG_TEXT_CHARS:
        return encoder.encode(texts, prompt_name)
    return await asyncio.to_thread(encoder.encode, texts, prompt_name)


async def _answer(
    state: ServerState, request: EmbeddingRequest, model: str, inputs: list[list[int]], request_id: str
) -> dict[str, Any]:
    answer_id = f"embd-{request_id}"
    outputs = await _run(state, answer_id, inputs, request.priority or 0)
    embedding = state.client.info.embedding
    assert embedding is not None
    data = []
    for index, output in enumerate(outputs):
        vector = cut(np.frombuffer(output.embedding or b"", np.float32), request.dimensions, embedding)
        value = _base64(vector) if request.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    tokens = sum(map(len, inputs))
    return {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


async def _run(state: ServerState, answer_id: str, inputs: list[list[int]], priority: int) -> list[EngineOutput]:
    """The engine's outputs, counted in the metrics however they end."""
    items = [embedding_request(f"{answer_id}-{next(state.numbers)}", ids, priority) for ids in inputs]
    state.admission.enter(len(items))
    started, begin, reason = time.monotonic(), time.perf_counter(), "abort"
    try:
        outputs = await state.client.embed(items)
        reason = "stop"
        return outputs
    except OctavoError:
        reason = "error"
        raise
    finally:
        for ids in inputs:
            state.admission.leave(started)
            state.metrics.count_embedding(len(ids), time.perf_counter() - begin, reason)


def _base64(vector: NDArray[np.float32]) -> str:
    """float32 numbers in little-endian order, as OpenAI's clients read them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
