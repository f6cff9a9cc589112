"""What quantization would do to the outputs of linear layers, measured before it is done.

The errors are sums over tokens of squared differences of the outputs, for layers W [N, K] that read the same inputs X.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.scheme import ActivationScheme, WeightScheme
from octavo.compress.number_formats import format_of
from octavo.compress.observers import FITTED, USES_IMPORTANCE, choose_grid, is_integer_grid, normal_importance
from octavo.compress.rounding import dequantize, global_scale, group_width, quantize
from octavo.ops.gram import bfloat16_products
from octavo.ops.integer_grid import Integers, rounding_difference

_ROWS = 512  # rows of a weight that stand for all of it: a row's error does not depend on the others


@dataclass(frozen=True)
class FutureLayer:
    """A float32 weight [N, K] and how it will be quantized; scheme None: it will not be."""

    weight: Tensor
    scheme: WeightScheme | None
    observer: str

    def sampled(self) -> FutureLayer:
        """The same with some five hundred to a thousand of its rows, where rows have scales of their own."""
        step = len(self.weight) // _ROWS
        if step < 2 or self.scheme is None or self.scheme.strategy not in ("group", "channel"):
            return self
        return replace(self, weight=self.weight[::step])

    def rounded(self, importance: Tensor, factors: Tensor) -> Tensor:
        """The weight [N, K] that reads inputs divided by `factors` [K], quantized; `importance` [K] is of the inputs
        as they are now."""
        weight = self.weight * factors
        if self.scheme is None:
            return weight
        overall = global_scale([weight], self.scheme)
        grid = choose_grid(weight, importance / factors.square(), self.scheme, self.observer, torch.float32, overall)
        return dequantize(quantize(weight, grid, self.scheme), grid, self.scheme)

    def difference(self, importance: Tensor, factors: Tensor, cut: float = 1.0) -> Tensor:
        """What quantization adds to the weight [N, K]; first magnitudes are cut to a share of their group's largest."""
        scheme = self.scheme
        if scheme is not None and self.observer in FITTED and is_integer_grid(scheme):
            weights = normal_importance(importance) if self.observer in USES_IMPORTANCE else None
            number, width = format_of(scheme), group_width(scheme, self.weight.shape[1])
            integers = Integers(number.low, number.high)
            return rounding_difference(self.weight, weights, width, integers, factors, cut)
        limited = self if cut == 1 else replace(self, weight=self.cut_to(torch.tensor(cut)))
        return limited.rounded(importance, factors).div_(factors).sub_(self.weight)

    def cut_to(self, shares: Tensor) -> Tensor:
        """The weight [N, K] with each group's magnitudes cut to a share (broadcastable to [N, G]) of its largest."""
        assert self.scheme is not None
        columns = self.weight.shape[1]
        width = group_width(self.scheme, columns)
        groups = torch.nn.functional.pad(self.weight, (0, -columns % width)).unflatten(1, (-1, width))
        bound = (groups.abs().amax(dim=-1) * shares).unsqueeze(-1)
        return torch.maximum(torch.minimum(groups, bound), -bound).flatten(1)[:, :columns].contiguous()


def weight_error(layers: Sequence[FutureLayer], hessian: Tensor, factors: Tensor) -> float:
    """Of rounding the weights: the sum over layers of tr((W' - W) H (W' - W)') with H = X'X [K, K]."""
    total = 0.0
    for layer in layers:
        difference = layer.difference(hessian.diagonal(), factors)
        with bfloat16_products():  # errors are compared with one another: no more digits are needed
            product = difference @ hessian
        total += float(torch.linalg.vecdot(product, difference).sum())
    return total


def output_error(
    layers: Sequence[FutureLayer], inputs: Tensor, outputs: Sequence[Tensor], importance: Tensor, factors: Tensor
) -> float:
    """Of rounding weights, and inputs where the scheme does: from some inputs [rows, K] and each layer's outputs."""
    total = 0.0
    divided = inputs / factors
    for layer, right in zip(layers, outputs, strict=True):
        activations = None if layer.scheme is None else layer.scheme.activations
        seen = divided if activations is None else rounded_activations(divided, activations)
        total += float((seen @ layer.rounded(importance, factors).t()).sub_(right).square_().sum())
    return total


def rounded_activations(inputs: Tensor, scheme: ActivationScheme) -> Tensor:
    """Inputs [rows, K] with a scale a row, or one for all where the scheme says so."""
    number = format_of(WeightScheme(scheme.num_bits, scheme.type, strategy="channel"))
    peak = inputs.abs().amax() if scheme.strategy == "tensor" else inputs.abs().amax(dim=-1, keepdim=True)
    scale = (peak / number.high).clamp_min(torch.finfo(torch.float32).tiny)
    return number.round_(inputs / scale) * scale


@contextmanager
def simulated(
    block: nn.Module, layers: Mapping[str, FutureLayer], importance: Tensor, factors: Tensor
) -> Iterator[None]:
    """Layers of a block (by name), which read the same inputs, compute as if they were quantized after division of
    the inputs by `factors` [K]; what makes the inputs stays as it is."""
    kept, handles = {}, []
    for name, layer in layers.items():
        module: Any = block.get_submodule(name)
        kept[name] = module.weight.data
        module.weight.data = layer.rounded(importance, factors).div_(factors).to(module.weight.dtype)
        activations = None if layer.scheme is None else layer.scheme.activations
        if activations is not None:

            def hook(
                module: nn.Module, args: tuple[Any, ...], scheme: ActivationScheme = activations
            ) -> tuple[Any, ...]:
                rows = rounded_activations((args[0].float() / factors).flatten(0, -2), scheme) * factors
                return (rows.view(args[0].shape).to(args[0].dtype), *args[1:])

            handles.append(module.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, weight in kept.items():
            block.get_submodule(name).weight.data = weight  # type: ignore[union-attr, assignment]
