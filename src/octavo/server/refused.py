"""Parameters that OpenAI or vLLM define and Octavo does not honour (yet): refused by name, never ignored.

Each has the values that ask for nothing, which clients and routers send as a matter of course and which are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """`neutral` are the accepted values besides null; `reason` is what to do instead."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        return value is None or any(
            value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in self.neutral
        )


_STRUCTURED = "answers that follow a schema or grammar are not available yet; leave it out"
_MEDIA = "this server takes text only"
_TRANSFER = "KV transfer between servers is not available yet"
_TOOLS = "tool calling is not available yet; leave it out"

COMMON: dict[str, Unsupported] = {
    "use_beam_search": Unsupported("beam search is not available; use n with sampling", (False,)),
    "length_penalty": Unsupported("it belongs to beam search, which is not available", (1.0,)),
    "logprob_token_ids": Unsupported("use logprobs or top_logprobs", ([],)),
    "structured_outputs": Unsupported(_STRUCTURED),
    "response_format": Unsupported(_STRUCTURED, ({"type": "text"},)),
    "guided_json": Unsupported(_STRUCTURED),
    "guided_regex": Unsupported(_STRUCTURED),
    "guided_choice": Unsupported(_STRUCTURED),
    "guided_grammar": Unsupported(_STRUCTURED),
    "guided_decoding_backend": Unsupported(_STRUCTURED),
    "guided_whitespace_pattern": Unsupported(_STRUCTURED),
    "thinking_token_budget": Unsupported("bound the answer with max_tokens"),
    "watermarking": Unsupported("watermarks are not available", (False,)),
    "repetition_detection": Unsupported("use repetition_penalty or frequency_penalty"),
    "kv_transfer_params": Unsupported(_TRANSFER),
    "ec_transfer_params": Unsupported(_TRANSFER),
    "vllm_xargs": Unsupported("this server has no extensions that take arguments", ({},)),
    "media_io_kwargs": Unsupported(_MEDIA, ({},)),
    "mm_processor_kwargs": Unsupported(_MEDIA, ({},)),
}

CHAT: dict[str, Unsupported] = COMMON | {
    "functions": Unsupported(_TOOLS, ([],)),
    "function_call": Unsupported(_TOOLS, ("none", "auto")),
    "audio": Unsupported(_MEDIA),
    "modalities": Unsupported(_MEDIA, (["text"],)),
    "prediction": Unsupported("predicted outputs are not available; leave it out"),
    "web_search_options": Unsupported("this server opens no connections on behalf of a request; leave it out"),
    "verbosity": Unsupported("ask for a short or long answer in the messages", ("medium",)),
    "service_tier": Unsupported("there is one tier; leave it out, or use priority", ("auto", "default")),
    "store": Unsupported("answers are not stored; leave it out", (False,)),
    "include_reasoning": Unsupported("reasoning is part of the content; turn it off in chat_template_kwargs", (True,)),
    "moderation": Unsupported("answers are not moderated; leave it out"),
}

COMPLETION: dict[str, Unsupported] = COMMON | {
    "best_of": Unsupported("set n: every sample is returned", (1,)),
    "suffix": Unsupported("insertion is not available; put what precedes the gap into prompt", ("",)),
    "prompt_embeds": Unsupported("prompts are text or token ids"),
}

EMBEDDING: dict[str, Unsupported] = {
    "messages": Unsupported("send the text as input"),
    "add_special_tokens": Unsupported("send token ids to choose the tokens yourself", (True,)),
    "embed_dtype": Unsupported("numbers are float32; leave it out", ("float32",)),
    "endianness": Unsupported("base64 holds little-endian numbers, as OpenAI's does; leave it out", ("little",)),
    "normalize": Unsupported("the model's own files say whether its vectors have unit length; leave it out"),
    "use_activation": Unsupported("the model's own files say whether its vectors have unit length; leave it out"),
    "padding": Unsupported("inputs are never padded; leave it out", (False, "longest")),
    "cache_salt": Unsupported("it is there for completions; leave it out"),
    "mm_processor_kwargs": Unsupported(_MEDIA, ({},)),
}

TOKENIZE: dict[str, Unsupported] = {"mm_processor_kwargs": Unsupported(_MEDIA, ({},))}
DETOKENIZE: dict[str, Unsupported] = {}

STREAM_OPTIONS: dict[str, Unsupported] = {"include_obfuscation": Unsupported("chunks are not padded", (False,))}

# Labels for the caller's own book-keeping: they ask the server to do nothing, so accepting them is honouring them.
LABELS = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id", "parallel_tool_calls"}
)
