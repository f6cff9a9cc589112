"""What of a decoder reads its residual stream and what adds to it, by name: the places where a rotation goes.

Everything in a block must be accounted for. A weight of unknown purpose would be left as it is and the model would
compute something else, so a block that holds one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.blocks import Blocks
from octavo.errors import UnsupportedModelError

READERS = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa",
    "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "input_linear", "gate", "router", "shared_expert_gate",
)  # fmt: skip
WRITERS = ("o_proj", "down_proj", "w2", "output_linear")
_INSIDE = ("q_b_proj", "kv_b_proj", "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")
_INSIDE_TENSORS = ("sinks", "e_score_correction_bias")
ATTENTION, FEED_FORWARD = "input_layernorm", "post_attention_layernorm"


@dataclass
class BlockLayout:
    """Tensor names within a block: those that read the residual by the norm in front of them, those that add to it
    (weights, with the residual along their last but one dimension), and the biases of the latter."""

    readers: dict[str, list[str]] = field(default_factory=lambda: {ATTENTION: [], FEED_FORWARD: []})
    writers: list[str] = field(default_factory=list)
    writer_biases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AttentionLayout:
    """Names within a block of the layers that make and read values: rows `first` and later of `values` are heads of
    `head_dim`, and so are all columns of `output`."""

    values: str
    output: str
    first: int
    head_dim: int


def residual_layout(model: Any, blocks: Blocks) -> list[BlockLayout]:
    """Every block's layout. UnsupportedModelError, by name and with the reason, where a rotation would change it."""
    kind = type(model).__name__
    hidden = model.config.get_text_config().hidden_size
    _check_outside(model, blocks, kind)
    layouts = []
    checked: set[type] = set()
    for index, block in enumerate(blocks.modules):
        name = blocks.name(index)
        layouts.append(_block_layout(block, hidden, f"{kind}: {name}"))
        for norm in (ATTENTION, FEED_FORWARD):
            module = block.get_submodule(norm)
            if type(module) not in checked:
                checked.add(type(module))
                norm_offset(module, f"{kind}: {name}.{norm}")
    return layouts


def _check_outside(model: Any, blocks: Blocks, kind: str) -> None:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    known = {id(part) for module in (embedding, output) if module is not None for part in module.parameters()}
    norm_name, norm = final_norm(model, blocks)
    norm_offset(norm, f"{kind}: {norm_name}")
    known |= {id(part) for part in norm.parameters()}
    for name, parameter in model.named_parameters():
        if not name.startswith(f"{blocks.prefix}.") and id(parameter) not in known:
            raise UnsupportedModelError(
                f"{kind}: {name} is outside of the blocks, and what it does to the residual stream is not known, so "
                "rotation R1 is impossible; use rotations=['R2']"
            )


def final_norm(model: Any, blocks: Blocks) -> tuple[str, nn.Module]:
    """Name and module of the norm between the blocks and the output layer: beside the list of blocks."""
    parent_name = blocks.prefix.rpartition(".")[0]
    for name, module in model.get_submodule(parent_name).named_children():
        if "norm" in name:
            return f"{parent_name}.{name}".lstrip("."), module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no norm beside {blocks.prefix}, so it is not known what its output layer reads; "
        "rotation R1 is impossible, use rotations=['R2']"
    )


def _block_layout(block: nn.Module, hidden: int, what: str) -> BlockLayout:
    _check_norms(block, what)
    layout = BlockLayout()
    for name, parameter in block.named_parameters():
        module, _, leaf = name.rpartition(".")
        owner = (module if leaf in ("weight", "bias") else name).rpartition(".")[2]
        parent = name.split(".")[0]
        if parent in layout.readers:
            continue
        is_reader, is_writer = owner in READERS, owner in WRITERS
        if is_reader and parameter.dim() >= 2 and parameter.shape[-1] == hidden:
            layout.readers[ATTENTION if "attn" in parent or "attention" in parent else FEED_FORWARD].append(name)
        elif is_writer and parameter.dim() >= 2 and parameter.shape[-2] == hidden:
            layout.writers.append(name)
        elif is_writer and leaf == "bias":
            layout.writer_biases.append(name)
        elif not (is_reader and leaf == "bias") and owner not in _INSIDE and leaf not in _INSIDE_TENSORS:
            raise UnsupportedModelError(
                f"{what}.{name} {list(parameter.shape)} is no weight that is known to read or to make the residual "
                "stream, so rotation R1 could change what the model computes; use rotations=['R2']"
            )
    return layout


def _check_norms(block: nn.Module, what: str) -> None:
    norms = [name for name, _ in block.named_children() if "norm" in name]
    after = [name for name in norms if name not in (ATTENTION, FEED_FORWARD)]
    if after or FEED_FORWARD not in norms or ATTENTION not in norms:
        which = after or norms or ["no norm"]
        raise UnsupportedModelError(
            f"{what} has {', '.join(which)}: where a norm follows attention or feed-forward, inside of the residual "
            "branch, its weight stands between their output and the residual and does not commute with a rotation. "
            "Rotation R1 is impossible; use rotations=['R2']"
        )


def norm_offset(norm: nn.Module, what: str) -> float:
    """What a norm adds to its weight: 0, or 1 for Gemma's. UnsupportedModelError unless it commutes with rotations.

    Found by trying it on random rows: with the right weight, an RMSNorm of rotated rows is the rotated RMSNorm.
    """
    names = [name for name, _ in norm.named_parameters()]
    if names == ["weight"]:
        generator = torch.Generator().manual_seed(0)
        size = int(next(norm.parameters()).numel())
        rows, weight = torch.randn(2, size, generator=generator), torch.rand(size, generator=generator)
        direction = torch.nn.functional.normalize(torch.rand(size, generator=generator), dim=0)
        offset = 0.0 if bool((_normed(norm, torch.zeros(size), rows) == 0).all()) else 1.0
        unit = _normed(norm, torch.full((size,), 1.0 - offset), rows)
        turned = _normed(norm, torch.full((size,), 1.0 - offset), _reflected(rows, direction))
        weighed = _normed(norm, weight, rows)
        close = torch.allclose(turned, _reflected(unit, direction), atol=1e-3)
        if close and torch.allclose(weighed, unit * (weight + offset), atol=1e-3):
            return offset
    raise UnsupportedModelError(
        f"{what} ({type(norm).__name__}) is no RMSNorm: a norm that subtracts the mean or adds a bias does not commute "
        "with rotations. R1 is for models with RMSNorm; use rotations=['R2']"
    )


def _normed(norm: nn.Module, weight: Tensor, rows: Tensor) -> Tensor:
    return torch.func.functional_call(norm, {"weight": weight}, (rows,))


def _reflected(rows: Tensor, direction: Tensor) -> Tensor:
    """Rows mirrored at the plane across a unit vector: the cheapest orthogonal change that mixes everything."""
    return rows - 2 * (rows @ direction)[:, None] * direction


def attention_layout(model: Any, blocks: Blocks) -> list[AttentionLayout]:
    """Where each block makes and reads values. UnsupportedModelError where they pass through anything but attention."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [
        _attention_layout(block, f"{type(model).__name__}: {blocks.name(index)}", heads, kv_heads, head_dim)
        for index, block in enumerate(blocks.modules)
    ]


def _attention_layout(block: nn.Module, what: str, heads: int, kv_heads: int, head_dim: int) -> AttentionLayout:
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    by_end = {name.rpartition(".")[2]: name for name in linears}
    output = by_end.get("o_proj") or by_end.get("out_proj") or by_end.get("dense")
    if output is not None:
        parent = output.rpartition(".")[0]
        columns = linears[output].in_features
        merged = by_end.get("qkv_proj")
        values, first = (merged, (heads + kv_heads) * head_dim) if merged else (by_end.get("v_proj"), 0)
        queries = by_end.get("q_proj")
        odd = [name for name, _ in block.get_submodule(parent).named_children() if name in ("v_norm", "gate_proj")]
        fits = values is not None and linears[values].out_features == first + kv_heads * head_dim
        fits = fits and (queries is None or linears[queries].out_features == heads * head_dim)
        if values is not None and fits and columns == heads * head_dim and not odd:
            return AttentionLayout(values, output, first, head_dim)
    raise UnsupportedModelError(
        f"{what}: no v_proj (or qkv_proj) of {kv_heads} heads of {head_dim} and o_proj of {heads} heads were found "
        "with nothing but attention between them, so rotation R2 is impossible; use rotations=['R1']"
    )
