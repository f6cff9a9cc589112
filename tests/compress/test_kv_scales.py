"""Scales of the KV cache: the largest keys and values that a block's attention saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model, token_samples

from octavo import LLM, SamplingParams
from octavo.compress.kv_scales import KeyValueWatcher, check_kv_cache_scheme
from octavo.compress.oneshot import oneshot
from octavo.errors import UnsupportedModelError, UserError
from octavo.modifiers import GPTQModifier


def peaks(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Largest key and value of each layer and head, from the cache that transformers fills."""
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    return [(layer.keys.abs().amax((0, 2, 3)), layer.values.abs().amax((0, 2, 3))) for layer in cache.layers]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scales_are_the_largest_keys_and_values(family: str, strategy: str, attention: str) -> None:
    model = tiny_model(family, head_dim=16)
    model.set_attn_implementation(attention)
    samples = torch.tensor(token_samples())
    expected, before = peaks(model, samples), model(samples).logits
    watcher = KeyValueWatcher(model, strategy, torch.float32)
    for index, block in enumerate(model.model.layers):
        name = f"model.layers.{index}"
        watcher.start(block, name)
        with torch.inference_mode():
            watched = [model(batch).logits for batch in samples.split(2)]
        scales = watcher.stop()
        torch.testing.assert_close(torch.cat(watched), before)
        for leaf, peak in zip(("k_scale", "v_scale"), expected[index], strict=True):
            wanted = (peak.max().reshape(1) if strategy == "tensor" else peak.reshape(2, 1, 1)) / 448
            torch.testing.assert_close(scales.pop(f"{name}.self_attn.{leaf}"), wanted)
        assert not scales
    assert model.config._attn_implementation == attention


def test_a_block_that_did_not_run_is_an_error() -> None:
    model = tiny_model("llama")
    watcher = KeyValueWatcher(model)
    watcher.start(model.model.layers[0], "model.layers.0")
    with pytest.raises(UnsupportedModelError, match="leave it out"):
        watcher.stop()


def test_schemes_of_the_cache() -> None:
    whole = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert check_kv_cache_scheme({"num_bits": 8, "type": "float"}) == whole
    assert check_kv_cache_scheme(whole | {"strategy": "attn_head"})["strategy"] == "attn_head"
    for wrong in ({"num_bits": 4}, {"type": "int"}, {"dynamic": True}, {"strategy": "token"}, {"bits": 8}):
        with pytest.raises(UserError, match="num_bits 8, type float, strategy tensor or attn_head"):
            check_kv_cache_scheme(wrong)


@pytest.mark.parametrize("batch_size", [1, 6])
def test_scales_are_stored_with_the_checkpoint(tmp_path: Path, batch_size: int) -> None:
    model = tiny_model("llama")
    recipe = GPTQModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"], kv_cache_scheme={"num_bits": 8, "type": "float"})
    data: dict[str, Any] = {"dataset": token_samples(), "batch_size": batch_size}
    oneshot(model, recipe=recipe, output_dir=tmp_path / "written", **data)
    stored = load_file(tmp_path / "written" / "model.safetensors")
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == "tensor"
    expected = peaks(model, torch.tensor(token_samples()))
    for index, (keys, values) in enumerate(expected):
        found = [stored[f"model.layers.{index}.self_attn.{leaf}_scale"] for leaf in "kv"]
        # Those of the weights before they were rounded count where there is more than one batch.
        torch.testing.assert_close(torch.cat(found) * 448, torch.stack([keys.max(), values.max()]), rtol=0.1, atol=0)
    fresh = tiny_model("llama")
    oneshot(fresh, recipe=recipe, **data)
    fresh.save_pretrained(tmp_path / "saved")
    assert {n: t.tolist() for n, t in load_file(tmp_path / "saved" / "model.safetensors").items() if "_proj" not in n
            } == {n: t.tolist() for n, t in stored.items() if "_proj" not in n}  # fmt: skip
    with LLM(str(tmp_path / "written"), dtype="float32", skip_tokenizer_init=True) as llm:
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=1))
