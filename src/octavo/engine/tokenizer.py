"""Tokenizers and chat templates: transformers does both, this adds errors that say what to do."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint import reader
from octavo.errors import CheckpointError, UserError


def load_tokenizer(model: str, tokenizer: str | None = None) -> Any:
    """The tokenizer of a model, or `tokenizer` (a directory, a .gguf file or a Hugging Face id) when that is given.

    Raises CheckpointError when there is none.
    """
    return reader.load_tokenizer(tokenizer or model)


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
