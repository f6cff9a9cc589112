"""benchmarks/gpu_kl.py on a tiny model: right kernels pass, a wrong one does not."""

from __future__ import annotations

from pathlib import Path

import gpu_kl
import pytest
import torch

from octavo.checkpoint.reader import open_checkpoint


@pytest.mark.parametrize("quantization", [None, "fp8", "w4a16"])
@torch.inference_mode()
def test_the_engine_is_as_near_to_the_reference_as_transformers(tiny_llama: Path, quantization: str | None) -> None:
    checkpoint = open_checkpoint(str(tiny_llama))
    tokens = torch.randint(259, (2, 32), generator=torch.Generator().manual_seed(0))
    result = gpu_kl.compare(checkpoint, tokens, torch.device("cpu"), quantization)
    assert 0 < result["transformers"] < 0.05
    assert set(gpu_kl.ratios(result)) == {"whole prompt", "chunks", "decode"}
    assert max(gpu_kl.ratios(result).values()) < 2.0, result  # of 64 tokens; the script's own limit is over 2,048


@torch.inference_mode()
def test_other_weights_are_far_away(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_llama))
    device, tokens = torch.device("cpu"), torch.randint(259, (1, 16))
    plain = gpu_kl.reference_logprobs(gpu_kl.build_reference(checkpoint, torch.float32, device, None), tokens, device)
    coarse = gpu_kl.reference_logprobs(
        gpu_kl.build_reference(checkpoint, torch.float32, device, "w4a16"), tokens, device
    )
    half = gpu_kl.reference_logprobs(gpu_kl.build_reference(checkpoint, torch.bfloat16, device, None), tokens, device)
    assert gpu_kl.divergence(plain, plain) == 0.0
    assert gpu_kl.divergence(plain, coarse) > 20 * gpu_kl.divergence(plain, half) > 0
