"""Conversations to prompt text, by the model's chat template."""

from __future__ import annotations

import inspect
import json
from typing import Any

from octavo.engine.tokenizer import render_chat, text_of_content
from octavo.errors import UserError
from octavo.server.config import ServerConfig, load_template
from octavo.server.errors import bad_request
from octavo.server.protocol import ChatCompletionRequest, TokenizeRequest

MAX_MESSAGES = 10_000


class ChatRenderer:
    """Renders the messages of chat requests. `tokenizer` holds the model's template, `config` may replace it."""

    def __init__(self, tokenizer: Any, config: ServerConfig) -> None:
        self._tokenizer = tokenizer
        self._template = load_template(config.chat_template)
        self._defaults = dict(config.default_chat_template_kwargs or {})
        self._trust_requests = config.trust_request_chat_template
        self._reserved = _reserved_names(tokenizer)
        self._check_kwargs(self._defaults, "default_chat_template_kwargs")

    def render(self, request: ChatCompletionRequest | TokenizeRequest) -> tuple[str, list[str]]:
        """The prompt text, and the names of template variables that the template does not use."""
        messages = [_plain_message(message, i) for i, message in enumerate(request.messages or [])]
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise bad_request(f"messages has {len(messages)} entries; it must have 1 to {MAX_MESSAGES}", "messages")
        continue_final = bool(request.continue_final_message)
        if continue_final and request.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt are both true; set one of them to false",
                "continue_final_message",
            )
        template = self._choose_template(request.chat_template)
        variables, unused = self._variables(request, template)
        text = render_chat(
            self._tokenizer,
            messages,
            chat_template=template,
            add_generation_prompt=request.add_generation_prompt is not False and not continue_final,
            continue_final_message=continue_final,
            tools=request.tools or None,
            **variables,
        )
        return text, unused

    def _choose_template(self, requested: str | None) -> str | None:
        if requested is None:
            return self._template
        if not self._trust_requests:
            raise bad_request(
                "chat_template: this server takes no templates from requests (--trust-request-chat-template allows it)",
                "chat_template",
            )
        return requested

    def _variables(
        self, request: ChatCompletionRequest | TokenizeRequest, template: str | None
    ) -> tuple[dict[str, Any], list[str]]:
        own = dict(request.chat_template_kwargs or {})
        self._check_kwargs(own, "chat_template_kwargs")
        source = template or str(getattr(self._tokenizer, "chat_template", None) or "")
        unused = [f"chat_template_kwargs.{name}" for name in own if name not in source]
        variables = self._defaults | own
        if isinstance(request, ChatCompletionRequest):
            named = {"reasoning_effort": request.reasoning_effort, "documents": request.documents}
            for name, value in named.items():
                if value and name not in source:
                    raise bad_request(f"{name}: the model's chat template has no use for it; leave it out", name)
                if value:
                    variables[name] = value
        return variables, unused

    def _check_kwargs(self, kwargs: dict[str, Any], param: str) -> None:
        wrong = next((name for name in kwargs if name in self._reserved or not name.isidentifier()), None)
        if wrong is not None:
            raise UserError(f"{param} may not set {wrong[:64]!r}: it is no variable of a template", param=param)


def _reserved_names(tokenizer: Any) -> frozenset[str]:
    """Arguments of the rendering itself, which a request must not reach through chat_template_kwargs."""
    names = set(inspect.signature(tokenizer.apply_chat_template).parameters) | set(
        inspect.signature(render_chat).parameters
    )
    return frozenset(names | {"messages", "chat_template", "tokenize"}) - {"documents"}


def _plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message with text as its content, as templates expect it."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise bad_request(f"{where} has no role; it must be a string such as 'user'", "messages")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise bad_request(f"{where} has no content; it must be a string or a list of text parts", "messages")
    plain = dict(message)
    plain["content"] = text_of_content(content, where)
    if message.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    return plain


def _tool_call(call: Any, where: str) -> Any:
    """Clients send a call's arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request(f"{where}.tool_calls holds an entry without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            raise bad_request(f"{where}.tool_calls has arguments that are not JSON", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
