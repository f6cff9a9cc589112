"""Any causal language model of transformers on the paged KV cache, through `AttentionInterface`.

transformers' modeling code runs as it is, on a packed row of tokens [1, T] with explicit positions and without a cache
of its own. Its attention calls come here, where keys and values are written to the pages and attention reads them.
The implementation has a name that transformers knows no mask for, so none is built.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError
from octavo.layers.attention import Attention
from octavo.layers.step import StepInputs
from octavo.layers.weights import WeightSource
from octavo.models.base import CausalLM
from octavo.models.transformers_check import (
    IMPLEMENTATION,
    AttentionCall,
    check_calls,
    check_class,
    dry_run,
    model_class,
    record,
    refusal,
)
from octavo.models.transformers_falcon import adapt_falcon
from octavo.models.transformers_weights import WeightPlan, load_weights

logger = logging.getLogger(__name__)


class PagedCall(nn.Module):
    """Hangs on a transformers attention module and answers its attention calls."""

    def __init__(self, attention: Attention, owner: StepHolder) -> None:
        super().__init__()
        self.attention = attention
        self.owner = owner

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """[1, heads, T, D] each -> [1, T, Hq, D]."""
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        out = self.attention.attend(q, k, v, self.owner.step, sinks)
        return out.view(1, q.shape[0], q.shape[1], q.shape[2])


class StepHolder:
    """The step that the forward pass under way belongs to; one a model."""

    step: StepInputs


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """The function behind `IMPLEMENTATION`: what transformers calls in place of its own attention."""
    if record(module, query, key, value, attention_mask, arguments):
        return query.transpose(1, 2).contiguous(), None
    return module.octavo_call(query, key, value, arguments.get("s_aux")), None  # type: ignore[operator]


class TransformersLM(CausalLM):
    """A transformers model with this package's linear layers and paged attention.

    Args:
        model: the causal language model with its weights.
        calls: its attention layers, in order.
        dtype: of activations and KV cache.
        max_position: positions that it was made for.
        hidden_size: size of the rows that its body returns (OPT may project them).
    """

    def __init__(
        self, model: Any, calls: list[AttentionCall], dtype: torch.dtype, max_position: int, hidden_size: int
    ) -> None:
        super().__init__()
        self.model, self.head = model, _head_of(model)
        self._dtype, self._holder = dtype, StepHolder()
        self.vocab_size = model.config.get_text_config().vocab_size
        self.hidden_size, self.max_position = hidden_size, max_position
        self._attention: list[Attention] = []
        for index, call in enumerate(calls):
            layer = Attention(
                index, call.num_heads, call.num_kv_heads, call.head_dim, call.scale, call.window, call.softcap
            )
            call.module.octavo_call = PagedCall(layer, self._holder)
            self._attention.append(layer)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def attention_layers(self) -> list[Attention]:
        return self._attention

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepInputs) -> Tensor:
        self._holder.step = step
        out = self.model.base_model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Through the model's own head code, so that soft caps, scales and biases are its own."""
        out = self.head(inputs_embeds=_Given(hidden[None]), use_cache=False)
        return out.logits[0].float()


class _Given:
    """Hidden states on their way through the head, in the clothes of embeddings and of a base model's output."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _GivenHidden(nn.Module):
    """Stands for a base model whose result is known: returns the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: _Given, **__: Any) -> _Given:
        return inputs_embeds

    @property
    def decoder(self) -> _GivenHidden:
        """OPT's head calls `model.decoder`."""
        return self


def _head_of(model: Any) -> Any:
    """A shallow copy of `model` without its body: calling it applies the head alone, to rows given as `_Given`."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = _GivenHidden()
    return head


# Model types whose attention does not go through AttentionInterface, and what makes it.
ADAPTERS = {"falcon": adapt_falcon}


def load_transformers_model(architecture: str, source: WeightSource, max_model_len: int | None) -> TransformersLM:
    """Builds `architecture` by transformers and fills it from `source`; refuses what would be served wrong first."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    config = _build_config(architecture, source.checkpoint.config)
    cls = model_class(architecture, config)
    adapt = ADAPTERS.get(config.model_type)
    check_class(architecture, cls, config, adapted=adapt is not None and adapt(IMPLEMENTATION, paged_attention))
    max_position = _max_position(architecture, config, max_model_len)
    calls, hidden_size = _probe(architecture, cls, config, max_position)
    with parameters_on_meta():
        model = _build(cls, config, source.dtype)
    freeze_rope(model, max_position)
    load_weights(model, WeightPlan(model, source))
    for path, call in calls.items():
        call.module = model.get_submodule(path)
    return TransformersLM(model.eval(), list(calls.values()), source.dtype, max_position, hidden_size)


def _probe(architecture: str, cls: Any, config: Any, max_position: int) -> tuple[dict[str, AttentionCall], int]:
    """The attention layers by module path and the size of a hidden row, from a dry run on a copy without weights."""
    config = copy.deepcopy(config)
    config._experts_implementation = "batched_mm"  # the others look at values, which the meta device has not
    try:
        with torch.device("meta"):
            probe = _build(cls, config, torch.float32).eval()
    except Exception as error:
        raise CheckpointError(f"no {architecture} can be built from its config.json: {error}") from error
    freeze_rope(probe, max_position)
    recorder = dry_run(architecture, probe.base_model)
    calls = check_calls(architecture, recorder, config, max_position)
    paths = {id(module): path for path, module in probe.named_modules()}
    return {paths[id(call.module)]: call for call in calls}, recorder.hidden_size


def _build_config(architecture: str, content: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = str(content.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise refusal(
            architecture, f"transformers knows no model_type {model_type!r} (code of a checkpoint is never run)"
        )
    kept = {key: _number(value) for key, value in content.items() if key not in ("quantization_config", "auto_map")}
    try:
        return CONFIG_MAPPING[model_type].from_dict(kept)
    except Exception as error:  # whatever a configuration class makes of values that it does not expect
        raise CheckpointError(f"config.json of {architecture} is not valid: {error}") from error


def _number(value: Any) -> Any:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def _build(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    model = cls._from_config(copy.deepcopy(config), attn_implementation=IMPLEMENTATION, dtype=dtype)
    for module in (model, model.base_model):  # GPT-2, for one, would look for padding at each call
        module.warn_if_padding_and_no_attention_mask = _no_padding
    return model


def _no_padding(*_: Any) -> None:
    """A packed row has no padding to warn of."""


def _max_position(architecture: str, config: Any, max_model_len: int | None) -> int:
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    own = next((getattr(text, name) for name in names if isinstance(getattr(text, name, None), int)), None)
    if own is None and max_model_len is None:
        raise refusal(architecture, "its config.json states no longest context; give --max-model-len")
    return min(own or max_model_len or 0, max_model_len or own or 0)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters made inside take no memory, while buffers are computed as ever (rotary frequencies have no file)."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def freeze_rope(model: nn.Module, max_position: int) -> None:
    """Makes rotary frequencies independent of what else is in a batch.

    transformers switches LongRoPE's frequencies, and grows dynamic NTK's, by the largest position of a call, while keys
    in the cache keep those they were written with. Here the longest sequence that will be served decides once: LongRoPE
    takes its long factors when that exceeds the original context. Dynamic NTK equals plain frequencies up to
    `max_position_embeddings`, beyond which nothing is served.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):  # frequencies by kind of layer
            for layer_type, kind in kinds.items():
                _choose_longrope(module, kind, max_position, layer_type)
            module.rope_type = {name: _frozen(kind) for name, kind in kinds.items()}  # type: ignore[assignment]
        elif isinstance(kinds, str):
            _choose_longrope(module, kinds, max_position, None)
            module.rope_type = _frozen(kinds)  # type: ignore[assignment]


def _choose_longrope(module: Any, kind: str, max_position: int, layer_type: str | None) -> None:
    if kind != "longrope":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    original = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    extra: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    longest = original + 1 if max_position > original else original
    setattr(module, name, ROPE_INIT_FUNCTIONS[kind](module.config, getattr(module, name).device, longest, **extra)[0])


def _frozen(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind
