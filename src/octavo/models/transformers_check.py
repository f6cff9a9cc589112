"""Can the generic route serve an architecture right? Decided by its class and a dry run, before any weight is read.

The dry run calls the model on the meta device (shapes without values) with an attention function that writes down what
it was given. So the number of layers that attend, their heads, windows, soft caps and scales are what the modeling code
really passes, not what a configuration suggests.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedModelError

IMPLEMENTATION = "octavo_paged"
SERVED_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
# What modeling code hands to every attention function and what changes nothing here.
_NEUTRAL_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "s_aux",
        "scaling",
        "sliding_window",
        "softcap",
        "training",
        "use_cache",
    }
)
_PROBE_TOKENS = 3


@dataclass
class AttentionCall:
    """What one layer's modeling code asked of its attention."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass
class Recorder:
    """What a dry run saw: the attention calls in order, what speaks against serving them, the size of a hidden row."""

    calls: list[AttentionCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hidden_size: int = 0


_recorder: ContextVar[Recorder | None] = ContextVar("octavo_attention_recorder", default=None)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Within it, `record` notes the attention calls of the current thread."""
    recorder = Recorder()
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]) -> bool:
    """Notes a call when a recording is on; False when none is."""
    recorder = _recorder.get()
    if recorder is None:
        return False
    recorder.problems += _call_problems(module, query, key, value, mask, arguments)
    scale = arguments.get("scaling")
    recorder.calls.append(
        AttentionCall(
            module=module,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            scale=float(scale if scale is not None else getattr(module, "scaling", query.shape[3] ** -0.5)),
            window=arguments.get("sliding_window"),
            softcap=arguments.get("softcap"),
            has_sinks=arguments.get("s_aux") is not None,
        )
    )
    return True


def _call_problems(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
) -> list[str]:
    problems = []
    if mask is not None:
        problems.append("its attention takes a mask or bias of its own (ALiBi, for one)")
    if key.shape[2] != query.shape[2] or query.shape[0] != 1:
        problems.append("its keys are not those of the same tokens as its queries")
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        problems.append(f"keys and values differ in size ({key.shape[3]} and {value.shape[3]}: latent attention)")
    if not (getattr(module, "is_causal", True) and arguments.get("is_causal", True) is not False):
        problems.append("its attention is not causal")
    unknown = [
        name
        for name, value in arguments.items()
        if name not in _NEUTRAL_ARGUMENTS and value is not None and value is not False
    ]
    if unknown:
        problems.append(f"its attention takes {', '.join(sorted(unknown))}, which the paged attention does not know")
    return problems


def model_class(architecture: str, config: Any) -> Any:
    """The causal language model of transformers that `config.json` names, or the refusal."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(architecture, f"transformers has no causal language model for model_type {config.model_type!r}")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = found if isinstance(found, (tuple, list)) else (found,)
    for candidate in classes:
        if candidate.__name__ == architecture:
            return candidate
    raise refusal(
        architecture, f"it is not the causal language model of model_type {config.model_type!r} ({classes[0].__name__})"
    )


def check_class(architecture: str, cls: Any, config: Any, adapted: bool = False) -> None:
    """Refuses what the class and its configuration already rule out. `adapted`: its attention was replaced by ours."""
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        raise refusal(architecture, "its layers are configured one by one")
    source = inspect.getsource(sys.modules[cls.__module__])
    reasons = [
        (text is not config, "it takes images, sound or video beside text"),
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder"),
        (getattr(cls, "_is_stateful", False), "it keeps a recurrent state beside or instead of a KV cache"),
        (getattr(text, "kv_lora_rank", None), "its attention keeps latent vectors (MLA)"),
        (getattr(text, "num_kv_shared_layers", None), "some of its layers read the KV cache of others"),
        (getattr(text, "alibi", False), "its attention adds ALiBi biases"),
        (getattr(text, "use_bidirectional_attention", None) in (True, "all"), "its attention is not causal"),
        ("self.is_decoder" in source and getattr(text, "is_decoder", True) is False, "its attention is not causal"),
        ("create_position_ids_from_input_ids" in source, "its positions depend on padding tokens"),
        (
            not adapted and "ALL_ATTENTION_FUNCTIONS" not in source,
            "its code does not call transformers' AttentionInterface",
        ),
    ]
    for wrong, reason in reasons:
        if wrong:
            raise refusal(architecture, reason)
    unknown = set(getattr(text, "layer_types", None) or ()) - set(SERVED_LAYER_TYPES)
    if unknown:
        raise refusal(architecture, f"it has layers of the kinds {', '.join(sorted(unknown))}")


def check_calls(architecture: str, recorder: Recorder, config: Any, max_position: int) -> list[AttentionCall]:
    """The attention layers that a dry run saw, or the refusal; a window that is never exceeded is none."""
    text, calls = config.get_text_config(), recorder.calls
    if recorder.problems:
        raise refusal(architecture, recorder.problems[0])
    layers = text.num_hidden_layers
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        raise refusal(
            architecture, f"{len(calls)} attention calls were seen in {layers} layers, where each must attend once"
        )
    types = getattr(text, "layer_types", None) or []
    for index, (call, kind) in enumerate(zip(calls, types, strict=False)):
        if (kind == "sliding_attention") != (call.window is not None):
            raise refusal(
                architecture, f"layer {index} is {kind!r}, but its attention was given the window {call.window}"
            )
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if window and window < max_position and not types and all(call.window is None for call in calls):
        raise refusal(architecture, f"its attention was not given the configured window {window}")
    for call in calls:
        call.window = None if call.window is None or call.window >= max_position else call.window
    return calls


def dry_run(architecture: str, body: nn.Module) -> Recorder:
    """One call of the model without its head, on the meta device."""
    if "position_ids" not in inspect.signature(inspect.unwrap(type(body).forward)).parameters:
        raise refusal(architecture, "its positions cannot be given from outside")
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    with recording() as recorder, torch.inference_mode():
        try:
            recorder.hidden_size = body(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state.shape[2]
        except Exception as error:
            if recorder.problems:
                raise refusal(architecture, recorder.problems[0]) from error
            raise refusal(architecture, f"a dry run of its code failed ({type(error).__name__}: {error})") from error
    return recorder


def refusal(architecture: str, reason: str) -> UnsupportedModelError:
    """The error for an architecture that would be served wrong, with what can be done."""
    return UnsupportedModelError(
        f"{architecture} cannot be served: {reason}. Served are causal language models of transformers whose layers "
        "all use full or sliding-window attention through AttentionInterface. Choose such a model, or another engine."
    )
