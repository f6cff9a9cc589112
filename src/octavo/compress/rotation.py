"""Rotations that cost nothing when a model runs, for they are multiplied into its weights (QuaRot; SpinQuant).

R1 turns the residual stream: whatever adds to it adds rotated rows, whatever reads it turns them back. An RMSNorm in
between commutes with a rotation once its weight is moved into the layers after it. R2 turns every head's values, which
attention only averages, until the output projection. Both are exact; products are in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.residual import AttentionLayout, BlockLayout, norm_offset
from octavo.layers.rotation import Rotation, rotated


def turn_block(block: nn.Module, layout: BlockLayout, rotation: Rotation, what: str) -> None:
    """Rotate the residual stream of a block by R1, in place; its norms get unit weights."""
    for norm_name, readers in layout.readers.items():
        scale = take_norm(block.get_submodule(norm_name), f"{what}.{norm_name}")
        turn_readers((block.get_parameter(name) for name in readers), scale, rotation)
    for name in layout.writers:
        weight = block.get_parameter(name)
        weight.data.copy_(rotated(weight.data, rotation, dim=-2))
    for name in layout.writer_biases:
        bias = block.get_parameter(name)
        bias.data.copy_(rotated(bias.data, rotation))


def take_norm(norm: nn.Module, what: str) -> Tensor:
    """The float64 factors that a norm multiplies its rows by, which become ones."""
    offset = norm_offset(norm, what)
    weight: Any = norm.weight
    factors = weight.data.to(torch.float64) + offset
    weight.data.fill_(1.0 - offset)
    return factors


def turn_readers(weights: Iterable[Tensor], scale: Tensor, rotation: Rotation) -> None:
    """W <- W diag(scale) R for weights that read what is rotated, in place."""
    for weight in weights:
        weight.data.copy_(rotated(weight.data, rotation, scale=scale))


def turn_ends(model: Any, norm_name: str, norm: nn.Module, rotation: Rotation) -> None:
    """R1 outside of the blocks: embeddings make rotated rows, the output layer reads them, with the norm's factors.

    The output layer has a tensor of its own by now (`untie`); one that was tied takes the embeddings' values.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    turn_readers([output.weight], take_norm(norm, norm_name), rotation)
    embedding.weight.data.copy_(rotated(embedding.weight.data, rotation))


def turn_values(block: nn.Module, layout: AttentionLayout, rotation: Rotation) -> None:
    """Rotate the values of every head of a block by R2, in place."""
    values, output = block.get_submodule(layout.values), block.get_submodule(layout.output)
    for part in (values.weight, values.bias):
        if isinstance(part, Tensor):
            heads = part.data[layout.first :].unflatten(0, (-1, layout.head_dim))
            heads.copy_(rotated(heads, rotation, dim=1))
    weight: Any = output.weight
    heads = weight.data.unflatten(1, (-1, layout.head_dim))
    heads.copy_(rotated(heads, rotation))
