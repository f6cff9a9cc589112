"""What does not belong to one family: dtypes, the longest sequence, cache specifications, the order of a batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES as NATIVE_CASES
from harness import Driver, assert_close, check_all_schedules, load, random_tokens, reference_logits, save_random
from test_native import VARIANTS
from test_transformers_route import CASES as ROUTE_CASES

from octavo.checkpoint.convert import convert
from octavo.checkpoint.safetensors_checkpoint import MAPPED_BYTES
from octavo.core.cache_groups import KVCacheSpec

CASES: dict[str, Any] = {**NATIVE_CASES, **VARIANTS, **ROUTE_CASES}


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3-bias-window", "gemma2", "gpt_neox", "mixtral"])
def test_bfloat16_stays_within_its_rounding(name: str, tmp_path: Path) -> None:
    """8 bits of mantissa through two layers and a narrow hidden state: 6 % of the spread."""
    reference = save_random(CASES[name], tmp_path, std=0.15 if name == "mixtral" else 0.2)
    model = load(tmp_path, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    tokens = random_tokens(model.vocab_size, 40, seed=2)
    driver = Driver(model)
    sequence = driver.add(tokens)
    for size in (17, 1, 1, 20, 1):
        driver.step([(sequence, size)])
    got = torch.stack([sequence.logits[position] for position in range(len(tokens))])
    spread = reference_logits(reference, tokens)
    if name == "mixtral":  # a router's choice may fall otherwise after rounding: most rows must agree
        close = (got - spread).abs().amax(1) < 0.06 * (spread.amax(1) - spread.amin(1))
        assert close.float().mean() > 0.7
    else:
        assert_close(got, spread, 0.06)


@pytest.mark.parametrize("name", ["llama-yarn", "opt"])
def test_shorter_sequences_shorten_the_model(name: str, tmp_path: Path) -> None:
    reference = save_random(CASES[name], tmp_path)
    assert load(tmp_path).max_position == 128
    model = load(tmp_path, max_model_len=80)
    assert model.max_position == 80
    check_all_schedules(model, reference)


@pytest.mark.parametrize(("longest", "like"), [(32, "short_factor"), (64, "long_factor")])
def test_longrope_takes_the_factors_of_the_longest_sequence_served(longest: int, like: str, tmp_path: Path) -> None:
    """transformers switches them from call to call, under keys that are already cached."""
    config = ROUTE_CASES["phi3-longrope"]
    reference = save_random(config, tmp_path)
    model = load(tmp_path, max_model_len=longest)
    for module in reference.modules():
        if hasattr(module, "inv_freq"):
            exponent = torch.arange(0, 8, 2).float() / 8
            module.inv_freq = 1.0 / (torch.tensor(config.rope_parameters[like]) * 10000.0**exponent)
            module.rope_type = "default"
    tokens = random_tokens(96, 30, seed=4)
    driver = Driver(model)
    sequence = driver.add(tokens)
    driver.step([(sequence, 30)])
    assert_close(torch.stack(list(sequence.logits.values())), reference_logits(reference, tokens))


@pytest.mark.parametrize(
    ("name", "impl", "windows"),
    [
        ("mistral", "native", [20, 20]),
        ("mistral", "transformers", [20, 20]),
        ("qwen2", "native", [None, 20]),
        ("qwen2", "transformers", [None, 20]),
        ("gemma2", "auto", [20, None]),
        ("gpt_oss", "auto", [20, None]),
        ("llama", "auto", [None, None]),
    ],
)
def test_cache_specifications(name: str, impl: str, windows: list[int | None], tmp_path: Path) -> None:
    config = CASES[name]
    save_random(config, tmp_path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    expected = [KVCacheSpec("sliding" if window else "full", 2, head_dim, window, 4) for window in windows]
    assert load(tmp_path, model_impl=impl).kv_cache_specs() == expected


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_window_that_nothing_exceeds_is_full_attention(impl: str, tmp_path: Path) -> None:
    save_random(NATIVE_CASES["mistral"], tmp_path)
    model = load(tmp_path, model_impl=impl, max_model_len=20)
    assert [spec.kind for spec in model.kv_cache_specs()] == ["full", "full"]


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_a_request_does_not_see_its_neighbours(name: str, tmp_path: Path) -> None:
    save_random(CASES[name], tmp_path)
    model = load(tmp_path)
    tokens = [random_tokens(96, length, seed=length) for length in (33, 21, 40)]
    alone = []
    for prompt in tokens:
        driver = Driver(model)
        sequence = driver.add(prompt)
        driver.step([(sequence, len(prompt))])
        alone.append(torch.stack(list(sequence.logits.values())))
    driver = Driver(model)
    together = [driver.add(prompt) for prompt in tokens]
    driver.step([(sequence, len(sequence.tokens)) for sequence in together])
    for sequence, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.stack(list(sequence.logits.values())), expected, atol=1e-3, rtol=1e-4)


LOAD_AND_MEASURE = """
import sys
from octavo.engine.config import EngineConfig
from octavo.engine.loading import load

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

load(EngineConfig(model=sys.argv[2], device="cpu"))  # whatever is imported or compiled at first use
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
loaded = load(EngineConfig(model=sys.argv[1], device="cpu", dtype="bfloat16"))
print(1024 * (kilobytes("VmHWM") - before), loaded.model.weight_bytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_loading_never_holds_two_copies(demo_path: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """The peak is the model, the largest tensor twice (as it is stored and as it is packed) and what stays mapped."""
    convert(demo_path, tmp_path / "plain")
    command = [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path / "plain"), str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights = (int(number) for number in done.stdout.split())
    largest = 49152 * 576 * 2
    assert weights > 250e6
    assert peak < weights + 2 * largest + MAPPED_BYTES + 2**24
