"""What a decode step may cost on a GPU: kernels a layer, copies, and no wait for the device while it is launched."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Two norms, four products, rotary with the store, attention with its merge, and the activation; with 8-bit inputs each
# product's input is rounded by a kernel of its own, unless it is fused into the one before.
KERNELS_A_LAYER = {None: 11, "w4a16": 11, "fp8": 15, "int8": 15}
KERNELS_A_MIXED_LAYER = 12  # two of attention, since decodes have one of their own, and no part of a product alone
KERNELS_BESIDE_LAYERS = 16  # inputs, embedding, last norm, output layer, the choice of tokens and its bookkeeping
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def decoding_engine(
    folder: Path, num_layers: int, params: SamplingParams, num_requests: int = 3, **more: Any
) -> Engine:
    """An engine whose requests have all sampled some tokens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": num_layers}))
    settings = {"load_format": "dummy", "kv_cache_memory_bytes": 1 << 27, "max_num_seqs": 8, **more}
    engine = Engine(EngineConfig(model=str(folder), skip_tokenizer_init=True, **settings))
    for i in range(num_requests):
        engine.add(EngineRequest(str(i), [5 + i] * 40, params))
    for _ in range(8):
        engine.step()
    return engine


def profiled(engine: Engine, steps: int = 4) -> Counter[str]:
    """How often each thing ran on the device during some steps."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = (e for e in result.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    counts = Counter(event.name for event in events)
    return Counter({name: -(-count // steps) for name, count in counts.items()})


def num_kernels(counts: Counter[str]) -> int:
    return sum(n for name, n in counts.items() if not name.startswith(("Memcpy", "Memset")))


@pytest.mark.parametrize("quantization", KERNELS_A_LAYER)
def test_kernels_of_a_decode_step(tmp_path: Path, quantization: str | None) -> None:
    """Two depths tell what a layer costs from what is there once."""
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    counts = [
        profiled(decoding_engine(tmp_path / str(layers), layers, params, quantization=quantization))
        for layers in (2, 6)
    ]
    few, many = map(num_kernels, counts)
    listed = "\n".join(f"{n:4} {name[:100]}" for name, n in counts[1].most_common())
    a_layer = (many - few) / 4
    assert 0 < a_layer <= KERNELS_A_LAYER[quantization], listed
    assert few - 2 * a_layer <= KERNELS_BESIDE_LAYERS, listed


def test_kernels_of_a_step_with_a_prompt_and_decodes(tmp_path: Path) -> None:
    counts = []
    for layers in (2, 6):
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        engine = decoding_engine(tmp_path / str(layers), layers, params)
        engine.drain()
        engine.add(EngineRequest("prompt", list(range(100)), params))
        seen = profiled(engine, 1)
        assert any("leading_kernel" in name for name in seen) and any("prefill_kernel" in name for name in seen)
        counts.append(seen)
    few, many = map(num_kernels, counts)
    listed = "\n".join(f"{n:4} {name[:100]}" for name, n in counts[1].most_common())
    assert 0 < (many - few) / 4 <= KERNELS_A_MIXED_LAYER, listed


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_one_copy_to_the_device_and_one_back_a_step(tmp_path: Path, settings: dict) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1, **settings)
    counts = profiled(decoding_engine(tmp_path / "model", 2, params))
    copies = {way: sum(n for name, n in counts.items() if name.startswith(f"Memcpy {way}")) for way in ("HtoD", "DtoH")}
    assert copies == {"HtoD": 1, "DtoH": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0, "logprobs": 0},
    ],
)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_launch_does_not_wait(tmp_path: Path, settings: dict, enforce_eager: bool) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, seed=3, **settings)
    engine = decoding_engine(tmp_path / "model", 2, params, enforce_eager=enforce_eager)
    engine.drain()
    scheduler, runner = engine._scheduler, engine._runner
    step = scheduler.schedule()
    assert step is not None and step.num_decodes == 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_flight = runner.launch(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(runner.collect(in_flight).tokens) == 3
