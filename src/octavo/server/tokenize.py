"""`/tokenize`, `/detokenize`, `/tokenizer_info`, and the render routes that routers ask for a request's tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.server.chat import encode_chat
from octavo.server.completions import encode_prompts
from octavo.server.errors import bad_request
from octavo.server.parse import Parsed
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.state import ServerState


async def tokenize(state: ServerState, request: TokenizeRequest) -> dict[str, Any]:
    state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("tokenize takes either prompt or messages, and one of them is required", "prompt")
    if request.prompt is not None:
        text, special = request.prompt, request.add_special_tokens is not False
    else:
        text, _ = state.need_chat().render(request)
        special = bool(request.add_special_tokens)
    codec = state.need_codec("prompt")
    ids = await codec.encode(text, add_special_tokens=special)
    strings = [codec.token_string(token_id) for token_id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": state.params.max_model_len, "tokens": ids, "token_strs": strings}


def detokenize(state: ServerState, request: DetokenizeRequest) -> dict[str, Any]:
    state.check_model(request.model)
    codec = state.need_codec("tokens")
    codec.check_ids(request.tokens, state.params.vocab_size, "tokens")
    return {"prompt": codec.decode(request.tokens, skip_special_tokens=False)}


def tokenizer_info(state: ServerState) -> dict[str, Any]:
    """What a client needs to know of the tokenizer in order to do without it."""
    tokenizer = state.need_codec("tokenizer").tokenizer
    special = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": state.params.max_model_len,
        "vocab_size": len(tokenizer),
        "chat_template": getattr(tokenizer, "chat_template", None),
        **{name: None if token is None else str(token) for name, token in special.items()},
    }


async def render_chat_request(
    state: ServerState, parsed: Parsed[ChatCompletionRequest], request_id: str
) -> dict[str, Any]:
    request = parsed.request
    model = state.check_model(request.model)
    _, ids, _ = await encode_chat(state, request)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested = state.params.requested_tokens(getattr(request, name), name, default=None)
    params = state.params.build(request, logprobs=None, prompt_logprobs=None)
    fitted = state.params.fit(params, len(ids), requested)
    answer_id = state.answer_id("chatcmpl", request, request_id)
    return {"request_id": answer_id, "model": model, "token_ids": ids, "sampling_params": dataclasses.asdict(fitted)}


async def render_completion_request(
    state: ServerState, parsed: Parsed[CompletionRequest], request_id: str
) -> list[dict[str, Any]]:
    """One object a prompt."""
    request = parsed.request
    model = state.check_model(request.model)
    params = state.params.build(request, logprobs=request.logprobs, prompt_logprobs=request.prompt_logprobs)
    answer_id = state.answer_id("cmpl", request, request_id)
    return [
        {
            "request_id": f"{answer_id}-{i}",
            "model": model,
            "token_ids": prompt.ids,
            "sampling_params": dataclasses.asdict(state.params.fit(params, len(prompt.ids), request.max_tokens)),
        }
        for i, prompt in enumerate(await encode_prompts(state, request))
    ]
