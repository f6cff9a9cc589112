"""Tokenizers and chat templates: transformers does both, this adds errors that say what to do."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint import reader
from octavo.errors import CheckpointError, UserError

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def load_tokenizer(model: str, tokenizer: str | None = None) -> Any:
    """The tokenizer of a model, or `tokenizer` (a directory, a .gguf file or a Hugging Face id) when that is given.

    Raises CheckpointError when there is none.
    """
    return reader.load_tokenizer(tokenizer or model)


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with a text as content, as templates expect it. Raises UserError for what is no conversation."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"messages is {messages!r}; it must be a list of {{'role', 'content'}}", param="messages")
    return [
        {**message, "content": text_of_content(message["content"], f"messages[{i}]")}
        if isinstance(message.get("content"), list)
        else message
        for i, message in enumerate(messages)
    ]


def text_of_content(content: Any, where: str) -> str:
    """The text of a message's content: a string, or the text parts of a list, one a line. None is an empty text.

    `where` names the message in errors. Raises UserError for parts that are no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UserError(f"{where}.content must be a string or a list of text parts", param="messages")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise UserError(
                f"{where}.content has a part of type {str(kind)[:40]!r}; only parts of type 'text' are taken",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """The prompt text for a conversation, by the model's own chat template (rendered in transformers' sandbox)."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the model has no chat template; pass one with chat_template, or use completions", param="messages"
        )
    if not messages:
        raise UserError("messages is empty; it must hold at least one message", param="messages")
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                **template_kwargs,
            )
        )
    except CheckpointError:
        raise
    except Exception as error:  # templates are programs of the model's author: whatever they raise is about the input
        raise UserError(f"the chat template refused the messages: {error}", param="messages") from error
