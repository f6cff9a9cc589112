"""How much the loss of a model rises when a layer is rounded to few bits: measured, for each layer and width.

One pass forward and one backward over some calibration sequences, block by block like everything here: the inputs of
all blocks are kept, and going back, each block is read again and run with gradients. Of a layer with inputs x_t and
output gradients g_t, the square of (sum over a sequence's tokens of g_tn x_tk) is the diagonal F of the Fisher
information of its weights, if the tokens whose likelihood has these gradients are drawn from what the model predicts.
The sum comes before the square: a rounding error is the same for all tokens, and what inputs have in common makes it
the same shift of all outputs, which attention does not average away as it would independent ones. Rounding errors e of
different weights are nearly independent, so to second order they add half the sum of F e^2 to the loss (LeCun, Denker,
Solla, "Optimal Brain Damage", 1990; Kunstner, Balles, Hennig, "Limitations of the Empirical Fisher Approximation",
2019, on drawing them). The errors are those of plain rounding at each width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import WeightScheme
from octavo.compress.assignment import Plan
from octavo.compress.blocks import Blocks, siblings
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.observers import choose_grid
from octavo.compress.rounding import dequantize, quantize
from octavo.compress.walker import BlockWalker

_PIECE = 256  # tokens whose logits are held at once


@dataclass(frozen=True)
class Unit:
    """Layers that get the same width, since servers read them as one (q, k and v; gate and up; the experts of a block).

    `loss` is what each width (None: unquantized) adds to the negative log-likelihood a token, as predicted; `size` the
    bytes that the layers then take.
    """

    names: tuple[str, ...]
    loss: dict[int | None, float]
    size: dict[int | None, int]


def measure(
    source: ModelSource,
    blocks: Blocks,
    plan: Plan,
    batches: Sequence[Tensor],
    widths: Sequence[int],
    progress: Callable[[float, str | None], None] = lambda done, note: None,
) -> list[Unit]:
    """The units of a plan's quantized layers, in order; `batches` are int64 [1, T]. Widths are in bits."""
    walker = BlockWalker(source.model, blocks, source.device)
    count = len(blocks.modules)
    with torch.no_grad():
        inputs = _forward(source, blocks, walker, list(batches), lambda index: progress(index / 2, None))
        gradients = _at_the_end(source, blocks, walker, batches)
    units: list[Unit] = []
    for index in reversed(range(count)):
        source.fill(blocks.modules[index], blocks.name(index))
        layers = {name: module for name, module in blocks.linears(index) if name in plan.schemes()}
        seen = _backward(index, blocks, walker, inputs.pop(), gradients, layers)
        units = _units(source, plan, layers, seen, widths, sum(batch.numel() for batch in batches)) + units
        source.release(blocks.modules[index], blocks.name(index))
        progress(count - index / 2, None)
    return units


def mean_loss(source: ModelSource, blocks: Blocks, batches: Sequence[Tensor]) -> float:
    """Negative log-likelihood a predicted token of `batches`, each int64 [B, T]; its exp is the perplexity."""
    walker = BlockWalker(source.model, blocks, source.device)
    with torch.no_grad():
        _forward(source, blocks, walker, list(batches), lambda index: None, keep=False)
        _fill_ends(source, blocks)
        total = sum(
            float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
            for waiting, batch in zip(walker.hidden, batches, strict=True)
            for hidden, ids in zip(waiting, batch, strict=True)
            for logits, targets in _pieces(walker, hidden[None], ids[None].to(source.device))
        )
    source.release(source.model, "", (f"{blocks.prefix}.",))
    return total / sum(batch.numel() - len(batch) for batch in batches)


def _forward(
    source: ModelSource,
    blocks: Blocks,
    walker: BlockWalker,
    batches: list[Tensor],
    done: Callable[[int], None],
    keep: bool = True,
) -> list[list[Tensor]]:
    """Run the model; the inputs [1, T, hidden] of each block, by batch, and in `walker.hidden` what comes out."""
    inside = (f"{blocks.prefix}.",)
    source.fill(source.model, "", inside)
    source.fill(blocks.modules[0], blocks.name(0))
    walker.start(batches)
    source.release(source.model, "", inside)
    inputs = []
    for index, block in enumerate(blocks.modules):
        if index:
            source.fill(block, blocks.name(index))
        if keep:
            inputs.append([hidden.clone() for hidden in walker.hidden])
        for batch in range(len(batches)):
            walker.advance(index, batch)
        source.release(block, blocks.name(index))
        done(index + 1)
    return inputs


def _fill_ends(source: ModelSource, blocks: Blocks) -> None:
    source.fill(source.model, "", (f"{blocks.prefix}.",))


def _pieces(walker: BlockWalker, hidden: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [t, vocabulary] from what the last block gives, `hidden` [1, T, H], and the next of ids [1, T], by pieces:
    logits of all tokens over a large vocabulary would take gigabytes."""
    last = ids.shape[1] - 1
    for start in range(0, last, _PIECE):
        piece = hidden[:, start : min(start + _PIECE, last)]
        targets = ids[0, start + 1 : start + 1 + piece.shape[1]]
        yield walker.logits(piece)[0].float(), targets


def _at_the_end(source: ModelSource, blocks: Blocks, walker: BlockWalker, batches: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each batch's loss by what its last block gives, for tokens as the model predicts them."""
    _fill_ends(source, blocks)
    gradients = []
    for hidden, batch in zip(walker.hidden, batches, strict=True):
        with torch.enable_grad():
            leaf = hidden.detach().clone().requires_grad_()
            for logits, _ in _pieces(walker, leaf, batch.to(source.device)):
                drawn = torch.multinomial(logits.detach().softmax(dim=-1), 1)[:, 0]
                nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
        gradients.append(leaf.grad)
    source.release(source.model, "", (f"{blocks.prefix}.",))
    return gradients  # type: ignore[return-value]


@dataclass
class _Seen:
    """Of one layer: the Fisher diagonal [N, K], and the sum of squares of its inputs [K]."""

    fisher: Tensor
    squares: Tensor


def _backward(
    index: int,
    blocks: Blocks,
    walker: BlockWalker,
    inputs: list[Tensor],
    gradients: list[Tensor],
    layers: dict[str, nn.Linear],
) -> dict[str, _Seen]:
    """Run block `index` with gradients on its inputs; `gradients` go from its outputs' to its inputs'."""
    seen = {
        name: _Seen(torch.zeros_like(m.weight, dtype=torch.float32), m.weight.new_zeros(m.in_features).float())
        for name, m in layers.items()
    }
    handles = [module.register_forward_hook(_watch(seen[name])) for name, module in layers.items()]
    try:
        for batch, waiting in enumerate(inputs):
            with torch.enable_grad():
                leaf = waiting.detach().requires_grad_()
                walker.run_on(index, walker.calls[batch], leaf).backward(gradients[batch])
            assert leaf.grad is not None
            gradients[batch] = leaf.grad
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _watch(seen: _Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        given = args[0].detach().flatten(0, -2).float()
        seen.squares += given.square().sum(dim=0)

        def arrived(gradient: Tensor) -> None:
            seen.fisher += (gradient.flatten(0, -2).float().t() @ given).square_()

        if output.requires_grad:
            output.register_hook(arrived)

    return hook


def _units(
    source: ModelSource,
    plan: Plan,
    layers: dict[str, nn.Linear],
    seen: dict[str, _Seen],
    widths: Sequence[int],
    tokens: int,
) -> list[Unit]:
    units = []
    for names in _together(layers):
        loss: dict[int | None, float] = {None: 0.0}
        size: dict[int | None, int] = {None: 0}
        for name in names:
            weight, assignment = layers[name].weight.float(), plan.layers[name]
            assert assignment.scheme is not None and isinstance(assignment.quantizer, QuantizationModifier)
            observer = assignment.quantizer.observer_name(assignment.observer)
            size[None] += weight.numel() * source.dtype.itemsize
            for width in widths:
                scheme = replace(assignment.scheme, num_bits=width)
                grid = choose_grid(weight, seen[name].squares, scheme, observer, source.dtype)
                error = dequantize(quantize(weight, grid, scheme), grid, scheme).sub_(weight).square_()
                added = 0.5 * float((seen[name].fisher * error).sum(dtype=torch.float64)) / tokens
                loss[width] = loss.get(width, 0.0) + added
                size[width] = size.get(width, 0) + stored_bytes(weight.shape, scheme, source.dtype.itemsize)
        units.append(Unit(tuple(names), loss, size))
    return units


def _together(names: Sequence[str] | dict[str, Any]) -> list[list[str]]:
    """Names of layers in groups that servers read as one."""
    groups: dict[str, list[str]] = {}
    for group in siblings(names):
        experts = re.match(r"(.*\.experts)\.\d+\.", group[0])
        groups.setdefault(experts[1] if experts else group[0], []).extend(group)
    return list(groups.values())


def stored_bytes(shape: Sequence[int], scheme: WeightScheme, scale_size: int) -> int:
    """Bytes of a packed weight [N, K] of integers, with scales, zero points and shape."""
    rows, columns = shape
    groups = scheme.num_groups(columns)
    words = rows * -(-columns * scheme.num_bits // 32)
    zeros = 0 if scheme.symmetric else groups * -(-rows * scheme.num_bits // 32)
    return 4 * (words + zeros) + rows * groups * scale_size + 16
