"""Every scheme on a tiny model: what is written means the changed weights, in Octavo and in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model, token_samples
from torch import Tensor, nn

from octavo import LLM, SamplingParams
from octavo.checkpoint.scheme import ActivationScheme
from octavo.compress.oneshot import oneshot
from octavo.compress.schemes import preset
from octavo.modifiers import GPTQModifier, QuantizationModifier

NAMES = ["W4A16_ASYM", "W3A16", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]


def model() -> Any:
    """Layers that blocks of 128 x 128 divide."""
    return tiny_model("llama", hidden_size=128, intermediate_size=256, num_key_value_heads=4)


def logprobs(llm: LLM, tokens: list[int]) -> Tensor:
    """Of each token but the first, given those before it."""
    answers = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = answers[0].prompt_logprobs
    assert found is not None
    return torch.tensor([entry[token].logprob for entry, token in zip(found[1:], tokens[1:], strict=True) if entry])


def expected_logprobs(reference: Any, tokens: list[int]) -> Tensor:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        return reference(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def round_inputs(reference: Any, activations: ActivationScheme, directory: Path) -> None:
    """Layers of `reference` round their inputs as the scheme says; static scales are those in `directory`."""
    top = 127 if activations.type == "int" else 448
    stored = load_file(directory / "model.safetensors")
    assert activations.dynamic != any(name.endswith(".input_scale") for name in stored)
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            static = stored.get(f"{name}.input_scale")

            def hook(module: nn.Module, args: tuple[Tensor], static: Tensor | None = static) -> Tensor:
                scale = args[0].abs().amax(-1, keepdim=True) / top if static is None else static
                levels = (args[0] / scale).clamp(-top, top)
                levels = levels.round() if activations.type == "int" else levels.to(torch.float8_e4m3fn).float()
                return levels * scale

            module.register_forward_pre_hook(hook)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_octavo_serves_what_was_written(name: str, tmp_path: Path) -> None:
    changed = model()
    oneshot(changed, dataset=token_samples(), recipe=GPTQModifier(scheme=name, ignore=["lm_head"]), output_dir=tmp_path)
    activations = preset(name).activations
    if activations is not None and activations.strategy != "group":  # those by group have no kernel and stay
        round_inputs(changed, activations, tmp_path)
    tokens = token_samples(1, 24, seed=11)[0]
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True) as llm:
        found = logprobs(llm, tokens)
    # Layers that are served dense, and activations, meet their rounding at slightly different values.
    tolerance = 1e-3 if activations is None else 0.03
    torch.testing.assert_close(found, expected_logprobs(changed, tokens), rtol=tolerance, atol=tolerance)


# compressed-tensors 0.20 gives packed zero points the shape of unpacked ones where it makes an empty model, so that
# transformers loads no asymmetric checkpoint, its own included; test_stored_schemes.py compares the bytes.
@pytest.mark.parametrize("name", NAMES[1:])
def test_transformers_loads_what_was_written(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    changed = model()
    recipe = QuantizationModifier(scheme=name, ignore=["lm_head"])
    oneshot(changed, dataset=token_samples(), recipe=recipe, output_dir=tmp_path)
    activations, small = preset(name).activations, "FP4" in name
    # It decodes FP4 to bfloat16 whatever the model's dtype is.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16 if small else torch.float32).eval()
    if activations is not None and activations.strategy != "group":
        round_inputs(changed, activations, tmp_path)
    ids = torch.tensor(token_samples(2, 24, seed=11))
    with torch.inference_mode():
        found, expected = loaded(ids).logits.float(), changed(ids).logits
    tolerance = 1e-3 if activations is None and not small else 0.08 if name != "FP8_BLOCK" else 0.25
    assert float((found - expected).norm() / expected.norm()) < tolerance


def test_precision_may_differ_by_layer(tmp_path: Path) -> None:
    changed = model()
    groups = {
        "attention": {"targets": ["re:.*self_attn"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "W3A16": ["re:.*up_proj", "re:.*gate_proj"],
        "NVFP4A16": ["re:.*down_proj"],
    }
    oneshot(
        changed, dataset=token_samples(), recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        output_dir=tmp_path,
    )  # fmt: skip
    tokens = token_samples(1, 24, seed=11)[0]
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True) as llm:
        torch.testing.assert_close(logprobs(llm, tokens), expected_logprobs(changed, tokens), rtol=1e-3, atol=1e-3)


def test_layers_that_blocks_do_not_divide_are_noted(tmp_path: Path) -> None:
    changed = tiny_model("llama", hidden_size=128, intermediate_size=256)  # keys and values have 64 rows
    oneshot(changed, recipe=QuantizationModifier(scheme="FP8_BLOCK", ignore=["lm_head"]), output_dir=tmp_path)
    report = json.loads((tmp_path / "compression_report.json").read_text())
    assert "blocks of 128 x 128 do not divide a weight: 4 layers use a scale a row instead" in report["notes"]
    stored = load_file(tmp_path / "model.safetensors")
    scales = {leaf: stored[f"model.layers.1.self_attn.{leaf}.weight_scale"].shape for leaf in ("q_proj", "k_proj")}
    assert scales == {"q_proj": (1, 1), "k_proj": (64, 1)}
