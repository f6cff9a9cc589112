"""What a compression did: the size by part, why the whole shrank by less than the codes, and the lines to print."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.compress.modifiers.base import LayerResult
from octavo.machine import cpu_name

EMBEDDINGS, OUTPUT, NORMS = "embeddings", "output layer", "norms and biases"
QUANTIZED, SCALES, DENSE = "quantized linear layers: codes", "quantized linear layers: scales", "other linear layers"
_ORDER = (EMBEDDINGS, OUTPUT, NORMS, DENSE, QUANTIZED, SCALES)


@dataclass
class Part:
    """Bytes of one kind of tensor before and after, and how many weights there are."""

    before: int = 0
    after: int = 0
    weights: int = 0


def size_report(
    stored: Mapping[str, tuple[int, int]], results: list[LayerResult], embedding: str, output: str, element_size: int
) -> dict[str, Any]:
    """Sizes by part.

    `stored` maps each stored tensor's name to (elements, bytes); `embedding` and `output` are the full names of these
    modules; `element_size` is bytes a weight had before.
    """
    parts = {name: Part() for name in _ORDER}
    layers = {result.name: result for result in results if result.scheme is not None}
    for result in layers.values():
        parts[QUANTIZED].before += math.prod(result.shape) * element_size
        parts[QUANTIZED].weights += math.prod(result.shape)
    for name, (elements, size) in stored.items():
        module, _, leaf = name.rpartition(".")
        if module in layers and leaf != "bias":
            parts[QUANTIZED if leaf in ("weight", "weight_packed") else SCALES].after += size
            continue
        part = parts[_kind(module, leaf, embedding, output)]
        part.before += size
        part.after += size
        part.weights += elements
    return _summary(parts, list(layers.values()))


def _kind(module: str, leaf: str, embedding: str, output: str) -> str:
    if module == embedding or "embed" in module.rpartition(".")[2]:
        return EMBEDDINGS
    if module == output:
        return OUTPUT
    is_norm = leaf == "bias" or "norm" in module.rpartition(".")[2] or "ln" in module.rpartition(".")[2]
    return NORMS if is_norm else DENSE


def _summary(parts: dict[str, Part], results: list[LayerResult]) -> dict[str, Any]:
    before = sum(part.before for part in parts.values())
    after = sum(part.after for part in parts.values())
    bits = sum(math.prod(r.shape) * r.scheme.num_bits for r in results if r.scheme) / max(parts[QUANTIZED].weights, 1)
    width = 8 * parts[QUANTIZED].before / max(parts[QUANTIZED].weights, 1)
    ideal = 100 * (1 - bits / width) if results else 0.0
    rows = [
        {"part": name, "before_bytes": part.before, "after_bytes": part.after, "weights": part.weights}
        for name, part in parts.items()
        if part.before or part.after
    ]
    report: dict[str, Any] = {"before_bytes": before, "after_bytes": after, "saved_percent": 100 * (1 - after / before)}
    report |= {"ideal_percent": ideal, "bits_a_weight": bits, "parts": rows}
    report["explanation"] = _explanation(parts, before, ideal, bits, width, report["saved_percent"])
    return report


def _explanation(
    parts: dict[str, Part], before: int, ideal: float, bits: float, width: float, saved: float
) -> list[str]:
    """Each part's share of the gap, in points of the original size: a part that did not shrink costs `ideal` of its
    share, scales cost what they add."""
    if not parts[QUANTIZED].weights:
        return ["no layer was quantized, so the checkpoint is as large as before"]
    lines = [
        f"{bits:g}-bit codes alone take {100 - ideal:.1f} % of {width:g}-bit weights, which would save {ideal:.1f} %; "
        f"the whole checkpoint shrank by {saved:.1f} %. The gap of {ideal - saved:.1f} points:"
    ]
    scales = parts[SCALES].after
    if scales:
        extra = 8 * scales / parts[QUANTIZED].weights
        lines.append(f"  {100 * scales / before:.1f} points: the scales, {extra:.2f} bits a weight")
    reasons = {
        EMBEDDINGS: "the embeddings stay unquantized",
        OUTPUT: "the output layer stays unquantized",
        NORMS: "norms and biases stay unquantized",
        DENSE: "linear layers that the recipe leaves alone",
    }
    for name, reason in reasons.items():
        share = 100 * parts[name].before / before
        if share:
            lines.append(f"  {share * ideal / 100:.1f} points: {reason}; they were {share:.1f} % of the original bytes")
    return lines


def layer_entry(result: LayerResult) -> dict[str, Any]:
    """A layer's line in the report."""
    return {
        "name": result.name,
        "shape": list(result.shape),
        "num_bits": None if result.scheme is None else result.scheme.num_bits,
        "group_size": None if result.scheme is None else result.scheme.group_size,
        "error": result.error,
        **result.details,
    }


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    import transformers

    return {
        "machine": platform.machine(),
        "processor": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _zeros(layers: list[dict[str, Any]]) -> list[str]:
    """What pruning reached, if there was any."""
    pruned = [(layer.get("pruning", layer), math.prod(layer["shape"])) for layer in layers]
    shares = [(about["sparsity"], weights) for about, weights in pruned if "sparsity" in about]
    if not shares:
        return []
    mean = sum(share * weights for share, weights in shares) / sum(weights for _, weights in shares)
    fewest = min(share for share, _ in shares)
    return [f"zeros in {len(shares)} layers: {mean:.1%} of their weights, {fewest:.1%} in the layer with the fewest"]


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a terminal."""
    size = report["size"]
    lines = [f"{'part':34}{'before':>12}{'after':>12}"]
    lines += [
        f"{part['part']:34}{_mb(part['before_bytes']):>12}{_mb(part['after_bytes']):>12}" for part in size["parts"]
    ]
    lines.append(f"{'all':34}{_mb(size['before_bytes']):>12}{_mb(size['after_bytes']):>12}")
    lines += size["explanation"]
    worst = sorted(report["layers"], key=lambda layer: -layer["error"])[:3]
    if worst:
        lines.append(
            f"relative output error: mean {report['mean_error']:.4f}; largest "
            + ", ".join(f"{layer['name']} {layer['error']:.4f}" for layer in worst)
        )
    lines += _zeros(report["layers"])
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["seconds"].items() if name != "total")
    lines.append(f"{report['seconds']['total']:.1f} s ({phases})")
    return lines + [f"note: {note}" for note in report["notes"]]


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size else "-"
