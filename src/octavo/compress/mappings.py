"""Which layers of a block can share factors: one makes channels, and nothing but some linear layers reads them.

Found by the names that transformers' decoders use. A name proves nothing, so whoever applies a mapping checks that the
block still computes the same (`BlockCheck`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.smoothing import exact_for_norm

_ATTENTION_NORMS = ("input_layernorm", "self_attn_layer_norm", "ln_1", "attention_norm", "attention_layernorm")
# A block may have several: the one that is named for what comes after it feeds the feed-forward layers.
_FEED_FORWARD_NORMS = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm",
                       "final_layer_norm", "ln_2", "ffn_norm", "feedforward_layernorm")  # fmt: skip
_ATTENTION_READERS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa")
_FEED_FORWARD_READERS = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "dense_h_to_4h", "c_fc", "w1", "w3", "gate",
                         "router", "shared_expert_gate")  # fmt: skip
_OUTPUTS = ("o_proj", "out_proj", "dense")
_GATED = (("up_proj", "down_proj", "gate_proj"), ("w3", "w2", "w1"), ("gate_up_proj", "down_proj", "gate_up_proj"))
_LATENT_NORMS = (("q_a_layernorm", "q_b_proj"), ("kv_a_layernorm", "kv_b_proj"))


@dataclass(frozen=True)
class Smoothing:
    """`smooth` makes channels and the weights `readers` [..., K] read them; names within a block.

    `smooth` is a norm, or a linear layer whose rows from `first` on make the channels. Where it makes fewer than the
    readers have (grouped-query attention), each of its heads of `head_dim` channels is read by `repeats` neighbouring
    heads of theirs. `input` is a module that has those channels as its first argument.
    """

    smooth: str
    readers: tuple[str, ...]
    input: str
    first: int = 0
    head_dim: int = 1
    repeats: int = 1

    def layers(self, block: nn.Module) -> dict[str, nn.Linear]:
        """The linear layers among the readers, by name."""
        names = [name.removesuffix(".weight") for name in self.readers if name.endswith(".weight")]
        modules = {name: block.get_submodule(name) for name in names}
        return {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}

    def shared(self, values: Tensor, largest: bool = False) -> Tensor:
        """[K]: the mean (or the largest) of the channels that have one factor, in place of each of them."""
        if self.repeats == 1:
            return values
        heads = values.view(-1, self.repeats, self.head_dim)
        one = heads.amax(dim=1, keepdim=True) if largest else heads.mean(dim=1, keepdim=True)
        return one.expand_as(heads).reshape(-1)

    def apply(self, block: nn.Module, factors: Tensor) -> Tensor:
        """Divide what `smooth` makes by factors [K] (shared among repeated heads), multiply the readers by them.

        Returns the factors that were used, which for a norm differ a little; their inverses undo it.
        """
        smooth = block.get_submodule(self.smooth)
        if isinstance(smooth, nn.Linear):
            made = factors.view(-1, self.repeats, self.head_dim)[:, 0].reshape(-1)
            for part in (smooth.weight, smooth.bias):
                if part is not None:
                    rows = part.data[self.first :]
                    rows.copy_(rows.float() / made.view(-1, *[1] * (part.dim() - 1)))
        else:
            factors = _divide_norm(smooth, factors)
        for name in self.readers:
            weight = block.get_parameter(name).data
            weight.copy_(weight.float() * factors)
        return factors


def _divide_norm(norm: nn.Module, factors: Tensor) -> Tensor:
    """Divide a norm's output; the factors that this is exact for."""
    weight: Any = norm.weight
    offset = norm_offset(norm)
    assert offset is not None
    divided, exact = exact_for_norm(factors, weight.data, offset)
    weight.data.copy_(divided)
    bias = getattr(norm, "bias", None)
    if bias is not None:
        bias.data.copy_(bias.data.float() / exact)
    return exact


def norm_offset(norm: nn.Module) -> float | None:
    """What a norm adds to its weight, 0 or (Gemma) 1; None unless its output is proportional to the sum of both."""
    names = {name for name, _ in norm.named_parameters()}
    if "weight" not in names or names - {"weight", "bias"} or norm.weight.dim() != 1:  # type: ignore[operator, union-attr]
        return None
    size = int(next(norm.parameters()).numel())
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(2, size, generator=generator), torch.rand(size, generator=generator) + 0.5

    def run(weight: Tensor) -> Tensor:
        values = {name: weight if name == "weight" else torch.zeros(size) for name in names}
        return torch.func.functional_call(norm, values, (rows,)).float()

    for offset in (0.0, 1.0):
        unit = run(torch.full((size,), 1.0 - offset))
        if torch.allclose(run(weight), unit * (weight + offset), rtol=1e-2, atol=1e-2):
            return offset
    return None


def find_smoothings(block: nn.Module, config: Any) -> list[Smoothing]:
    """All of a block that its modules' names tell of, in the order in which they run."""
    children = dict(block.named_children())
    attention = next((name for name, module in children.items() if _is_attention(name, module)), None)
    feed_forward = next((name for name, module in children.items() if _is_feed_forward(name, module)), None)
    found = [*_from_norms(block, attention, feed_forward)]
    if attention is not None:
        found += _inside_attention(block, attention, config)
    for up, down, gate in _GATED:
        found += _gated(block, up, down, gate)
    return found


def _is_attention(name: str, module: nn.Module) -> bool:
    return ("attn" in name or "attention" in name) and any(isinstance(part, nn.Linear) for part in module.modules())


def _is_feed_forward(name: str, module: nn.Module) -> bool:
    return name in ("mlp", "feed_forward", "block_sparse_moe", "ffn", "fc1") and any(True for _ in module.parameters())


def _from_norms(block: nn.Module, attention: str | None, feed_forward: str | None) -> Iterator[Smoothing]:
    """Norms before attention and before the feed-forward layers; without the second, the first feeds both."""
    first = next((name for name in _ATTENTION_NORMS if _has(block, name)), None)
    second = next((name for name in _FEED_FORWARD_NORMS if _has(block, name)), None)
    if first is None or attention is None:
        return  # the norms come after what they normalize (OLMo 2), so nothing reads them alone
    of_attention = _readers(block, block.get_submodule(first), attention, _ATTENTION_READERS)
    of_feed_forward = []
    if feed_forward is not None:
        norm = block.get_submodule(second or first)
        of_feed_forward = _readers(block, norm, feed_forward, _FEED_FORWARD_READERS)
    if second is None:
        of_attention, of_feed_forward = of_attention + of_feed_forward, []
    for name, readers in ((first, of_attention), (second, of_feed_forward)):
        if name is not None and readers and norm_offset(block.get_submodule(name)) is not None:
            many = any("experts" in reader for reader in readers)
            source = feed_forward if many and feed_forward is not None else readers[0].rpartition(".")[0]
            yield Smoothing(name, tuple(readers), source)


def _has(block: nn.Module, name: str) -> bool:
    return isinstance(getattr(block, name, None), nn.Module)


def _readers(block: nn.Module, norm: nn.Module, part: str, names: tuple[str, ...]) -> list[str]:
    """Weights below `part` that read rows of a norm, by name; none where experts have theirs the other way round."""
    width = int(next(norm.parameters(), torch.empty(0)).numel())
    found = []
    for name, parameter in block.get_submodule(part).named_parameters(prefix=part):
        owner, _, leaf = name.rpartition(".")
        named = owner.rpartition(".")[2] if leaf == "weight" else leaf
        if named in names and parameter.dim() >= 2:
            if parameter.shape[-1] == width:
                found.append(name)
            elif parameter.dim() == 3:
                return []
    return found


def _inside_attention(block: nn.Module, attention: str, config: Any) -> Iterator[Smoothing]:
    module = block.get_submodule(attention)
    for norm, reader in _LATENT_NORMS:
        if _has(module, norm) and _has(module, reader) and norm_offset(module.get_submodule(norm)) is not None:
            name = f"{attention}.{reader}"
            yield Smoothing(f"{attention}.{norm}", (f"{name}.weight",), name)
    output = next((name for name in _OUTPUTS if isinstance(getattr(module, name, None), nn.Linear)), None)
    values = next((name for name in ("v_proj", "qkv_proj") if isinstance(getattr(module, name, None), nn.Linear)), None)
    if output is None or values is None or _has(module, "v_norm"):
        return
    text = config.get_text_config()
    heads = text.num_attention_heads
    columns, rows = getattr(module, output).in_features, getattr(module, values).out_features
    head_dim = columns // heads
    made = rows if values == "v_proj" else (rows - columns) // 2  # queries, keys, values
    if head_dim and made > 0 and made % head_dim == 0 and columns % made == 0:
        name = f"{attention}.{output}"
        yield Smoothing(f"{attention}.{values}", (f"{name}.weight",), name, rows - made, head_dim, columns // made)


def _gated(block: nn.Module, up: str, down: str, gate: str) -> Iterator[Smoothing]:
    """The factor that a gate lets through is linear in `up`, so its rows and the columns of `down` are a pair."""
    for name, module in block.named_modules():
        parts = [getattr(module, part, None) for part in (up, down, gate)]
        if all(isinstance(part, nn.Linear) for part in parts):
            first = parts[0].out_features - parts[1].in_features  # type: ignore[union-attr]
            if first in (0, parts[1].in_features):  # type: ignore[union-attr]
                prefix = f"{name}." if name else ""
                yield Smoothing(f"{prefix}{up}", (f"{prefix}{down}.weight",), f"{prefix}{down}", first)


class BlockCheck:
    """Whether a block still computes what it did, on the first sequence that it last ran on."""

    def __init__(self) -> None:
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handle: Any = None
        self._before: Tensor | None = None

    def attach(self, block: nn.Module) -> None:
        """Take note of what the block is called with."""
        self.detach()
        self._handle = block.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (args, kwargs)

    def begin(self, block: nn.Module) -> None:
        """The block as it is now is right."""
        assert self._call is not None
        args, kwargs = self._call
        self.detach()
        hidden = args[0] if args else kwargs["hidden_states"]
        self._call = _first_sequence((args, kwargs), len(hidden))
        self._before = self._run(block)

    def difference(self, block: nn.Module) -> float:
        """Mean over tokens of the change of the output, relative to what the block adds to its input."""
        assert self._call is not None and self._before is not None
        args, kwargs = self._call
        hidden = (args[0] if args else kwargs["hidden_states"]).float()
        added = torch.linalg.vector_norm(self._before - hidden, dim=-1)
        changed = torch.linalg.vector_norm(self._run(block) - self._before, dim=-1)
        return float((changed / added.clamp_min(1e-30)).nan_to_num(1.0).clamp_max(1.0).mean())

    def detach(self) -> None:
        """Forget the block."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._call, self._before = None, None, None

    def _run(self, block: nn.Module) -> Tensor:
        assert self._call is not None
        output = block(*self._call[0], **self._call[1])
        return (output[0] if isinstance(output, tuple) else output).float()


def _first_sequence(value: Any, count: int) -> Any:
    """`value` with the first of `count` sequences of every tensor that has as many."""
    if isinstance(value, Tensor):
        return value[:1] if count > 1 and value.dim() > 1 and len(value) == count else value
    if isinstance(value, tuple):
        return tuple(_first_sequence(item, count) for item in value)
    if isinstance(value, dict):
        return {key: _first_sequence(item, count) for key, item in value.items()}
    return value
