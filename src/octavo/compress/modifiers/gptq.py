"""GPTQModifier: round weights one column after the other, later columns make good for the error so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.compress.gptq_solver import GPTQSettings, Solution, solve
from octavo.compress.modifiers.base import LayerResult, LinearLayer
from octavo.compress.modifiers.quantization import QuantizationModifier
from octavo.compress.rounding import global_scale
from octavo.compress.statistics import InputStatistics
from octavo.errors import UserError

SOLVED_AT_ONCE = 1 << 26  # weights
_ACT_ORDERS = {"static": True, "weight": True, None: False, False: False}


@dataclass(kw_only=True)
class GPTQModifier(QuantizationModifier):
    """GPTQ, with LLM Compressor's argument names.

    `dampening_frac` of the Hessian's mean diagonal is added to it; ten and a hundred times that are tried when it is
    not positive definite, and then the layer is only rounded, which the report says. `actorder` "static" (or "weight")
    takes columns by falling importance, None as they are; neither needs an index in the checkpoint, for scales are
    chosen beforehand, on groups of neighbouring columns. With `align` a layer is to compute what it computed in the
    model as it came, from the inputs that the compressed layers before it give it; that takes a second pass over the
    data, through the block as it was.
    """

    block_size: int = 128
    dampening_frac: float = 0.01
    actorder: str | bool | None = "static"
    align: bool = True

    default_observer = "imatrix_signed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise UserError(f"block_size is {self.block_size}; it must be at least 1", param="block_size")
        if not 0 < self.dampening_frac < 1:
            raise UserError(f"dampening_frac is {self.dampening_frac}; it must be above 0 and below 1; 0.01 is usual")
        if self.actorder not in _ACT_ORDERS:
            raise UserError(f"actorder is {self.actorder!r}; it must be 'static', 'weight' or None")

    @property
    def statistics(self) -> frozenset[str]:
        return super().statistics | ({"hessian", "drift"} if self.align else {"hessian"})

    def quantize(self, layers: list[LinearLayer], inputs: InputStatistics | None) -> list[LayerResult]:
        if inputs is None or inputs.tokens == 0:
            why = "it saw no calibration token" if inputs is None else "no calibration token was finite"
            results = super().quantize(layers, None)
            for result in results:
                result.notes.append(f"{result.name}: only rounded, not GPTQ: {why}")
                result.details["fallback"] = why
            return results
        hessian, drift = inputs.hessian(), inputs.drift() if "drift" in inputs.kinds else None
        solved: dict[str, LayerResult] = {}
        for batch in _solvable_together(layers):
            observer, scheme = self.observer_name(batch[0].observer), batch[0].scheme
            assert scheme is not None
            settings = GPTQSettings(self.block_size, self.dampening_frac, _ACT_ORDERS[self.actorder], observer)
            masks = [layer.mask for layer in batch]
            overall = global_scale([layer.weight for layer in layers if layer.scheme == scheme], scheme)
            solutions = solve(
                [layer.weight for layer in batch],
                hessian,
                scheme,
                settings,
                batch[0].scale_dtype,
                masks,
                drift,
                overall,
            )
            for layer, solution in zip(batch, solutions, strict=True):
                solved[layer.name] = self._result(layer, solution, observer, inputs)
        return [solved[layer.name] for layer in layers]

    def _result(self, layer: LinearLayer, solution: Solution, observer: str, inputs: InputStatistics) -> LayerResult:
        error = float(solution.error.sum() / solution.norm.sum().clamp_min(1e-30))
        details: dict[str, Any] = {"algorithm": "gptq", "observer": observer, "damping": solution.damping}
        details |= {"dead_inputs": solution.dead, "aligned": "drift" in inputs.kinds and inputs.drift() is not None}
        result = self._layer_result(layer, solution.codes, solution.grid, error, details, inputs)
        result.notes += self._notes(layer.name, solution)
        return result

    def _notes(self, name: str, solution: Solution) -> list[str]:
        notes = []
        if solution.damping is None:
            notes.append(f"{name}: only rounded, not GPTQ: its Hessian is not positive definite at any damping tried")
        elif solution.damping > self.dampening_frac:
            notes.append(
                f"{name}: the Hessian needed a damping of {solution.damping:g} instead of {self.dampening_frac:g}"
            )
        return notes


def _solvable_together(layers: list[LinearLayer]) -> list[list[LinearLayer]]:
    """Layers of the same scheme, observer and dtype, in order: their rows can be solved as one weight.

    On a CPU large ones are solved one after the other, for a few float32 copies are held of what is solved at once.
    """
    batches: dict[Any, list[LinearLayer]] = {}
    for layer in layers:
        alike = (layer.scheme, layer.observer, layer.scale_dtype)
        together = batches.setdefault(alike, [])
        count = sum(other.weight.numel() for other in together) + layer.weight.numel()
        if together and count > SOLVED_AT_ONCE and not layer.weight.is_cuda:
            batches[(*alike, layer.name)] = batches.pop(alike)
            together = batches.setdefault(alike, [])
        together.append(layer)
    return list(batches.values())
