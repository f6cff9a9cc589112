"""benchmarks/gpu_probe.py on a tiny model against the engine's own model in float32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import gpu_kl
import gpu_probe
import pytest
import torch
from torch import Tensor

from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.scheme import ActivationScheme
from octavo.layers import weights
from octavo.layers.quantize import quantize_weight
from octavo.models import load_model


def with_int8_inputs(weight: Tensor, quantization: str) -> QuantizedWeight:
    """What is not made on load: 8-bit weights whose inputs are rounded to int8."""
    found = quantize_weight(weight, quantization)
    assert isinstance(found, QuantizedWeight)
    return replace(found, scheme=replace(found.scheme, activations=ActivationScheme(type="int")))


@pytest.mark.parametrize("quantization", [None, "w4a16", "fp8", "w8a8"])
@torch.inference_mode()
def test_the_reference_is_the_engine_in_float32(
    tiny_llama: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quantization == "w8a8":
        monkeypatch.setattr(weights, "quantize_weight", with_int8_inputs)
        quantization = "int8"
    checkpoint, device = open_checkpoint(str(tiny_llama)), torch.device("cpu")
    prompts = [prompt[:60] for prompt in gpu_probe.probe_prompts(258)]
    found = gpu_probe.Reference(checkpoint, device, quantization, torch.float32).logprobs(prompts)
    model = load_model(checkpoint, dtype=torch.float32, device=device, quantization=quantization, max_model_len=64)
    engine = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        logprobs = gpu_kl.PagedModel(model, 1, 64, device).run(tokens, [len(prompt)])[0, :-1].log_softmax(-1)
        engine.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    floor = gpu_probe.difference(found["float32"], found["bf16"])
    assert gpu_probe.difference(found["float32"], found["bf16 inputs"]) > 0
    assert gpu_probe.difference(found["float32"], engine) < 0.1 * floor


def test_prompts_are_drawn_in_order_from_one_seed() -> None:
    prompts, rng = gpu_probe.probe_prompts(1000), random.Random("probe")
    assert [len(prompt) for prompt in prompts] == [17, 64, 200, 500]
    assert [token for prompt in prompts for token in prompt] == [rng.randint(100, 1000) for _ in range(781)]


def test_probes_of_other_prompts_are_refused() -> None:
    assert gpu_probe.difference([[1.0], [2.0, 4.0]], [[1.5], [2.0, 3.0]]) == 0.5
    with pytest.raises(SystemExit, match="other prompts"):
        gpu_probe.difference([[1.0]], [[1.0, 2.0]])
