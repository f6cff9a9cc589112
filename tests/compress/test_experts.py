"""Mixtures of experts: each expert's projections are layers of their own, calibrated on all tokens or on their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import crash_after
from tiny_models import tiny_model, token_samples
from torch import nn

from octavo.checkpoint.reader import open_checkpoint
from octavo.compress.experts import FAMILIES, calibrate_all_experts, routers, separate_experts
from octavo.compress.oneshot import oneshot
from octavo.errors import UnsupportedModelError
from octavo.modifiers import GPTQModifier, QuantizationModifier

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1},
    "glm4_moe": ROUTED,
    "deepseek_v2": {**ROUTED, **LATENT, "num_key_value_heads": 4},
    "deepseek_v3": {**ROUTED, **LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
}


def logits(model: Any, ids: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


def test_every_family_is_tested() -> None:
    assert CHANGES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_separate_experts_are_the_fused_ones_under_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family, **CHANGES[family]), token_samples(2, 20)
    model.save_pretrained(tmp_path)
    expected = logits(model, ids)
    separate_experts(model)
    assert model.state_dict().keys() == set(open_checkpoint(tmp_path).names())
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    calibrate_all_experts(model, True)
    seen: list[int] = []
    linears = [
        module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".experts." in name
    ]
    hooks = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0])) for module in linears]
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-4, rtol=1e-4)
    assert seen == [40] * len(linears)
    for hook in hooks:
        hook.remove()
    assert list(routers(model))


def prompt_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, by the engine."""
    from octavo import LLM, SamplingParams

    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**20}
    with LLM(str(folder), dtype="float32", device="cpu", **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert answer.prompt_logprobs is not None
    entries = zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in entries if entry is not None])


@pytest.mark.parametrize("all_experts", [True, False], ids=["all-tokens", "own-tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compressed_mixture_is_served_with_its_dequantized_logits(
    family: str, all_experts: bool, tmp_path: Path
) -> None:
    tiny_model(family, **CHANGES[family]).save_pretrained(tmp_path / "plain")
    recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=16)
    changed = oneshot(
        str(tmp_path / "plain"),
        dataset=token_samples(),
        recipe=recipe,
        output_dir=tmp_path / "small",
        moe_calibrate_all_experts=all_experts,
    )
    stored = load_file(tmp_path / "small" / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = {name.removesuffix("_packed") for name in stored if name.endswith("weight_packed")}
    assert packed == {name for name in plain if name.endswith("_proj.weight") or "mqa" in name or ".experts." in name}
    ignored = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["ignore"]
    gates = (".gate.weight", ".shared_expert_gate.weight")
    assert {name.removesuffix(".weight") for name in plain if name.endswith(gates)} <= set(ignored)
    report = json.loads((tmp_path / "small" / "compression_report.json").read_text())
    aligned = {layer["name"]: layer["aligned"] for layer in report["layers"]}
    assert all(is_aligned == (all_experts or ".experts." not in name) for name, is_aligned in aligned.items())
    ids = token_samples(1, 40, seed=11)[0]
    scores = logits(changed, [ids])[0, :-1].log_softmax(dim=-1)
    expected = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(prompt_logprobs(tmp_path / "small", ids), expected, atol=2e-3, rtol=1e-3)


def test_experts_that_see_no_token_are_only_rounded_unless_all_are_calibrated(tmp_path: Path) -> None:
    """16 tokens, each sent to two, cannot reach all of 40 experts."""
    tiny_model("mixtral", num_local_experts=40, intermediate_size=32, num_hidden_layers=1).save_pretrained(
        tmp_path / "plain"
    )
    notes = {}
    for name, all_experts in (("all", True), ("own", False)):
        recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=16)
        oneshot(
            str(tmp_path / "plain"), dataset=token_samples(2, 8), recipe=recipe, output_dir=tmp_path / name,
            moe_calibrate_all_experts=all_experts,
        )  # fmt: skip
        notes[name] = json.loads((tmp_path / name / "compression_report.json").read_text())["notes"]
    assert not any("no calibration token" in note for note in notes["all"])
    unseen = [note for note in notes["own"] if "it saw no calibration token" in note]
    assert unseen
    assert all(".experts." in note for note in unseen)


def test_layers_of_an_expert_share_a_scale_and_no_others(tmp_path: Path) -> None:
    tiny_model("mixtral", **CHANGES["mixtral"]).save_pretrained(tmp_path / "plain")
    recipe = GPTQModifier(scheme="NVFP4A16", ignore=["lm_head"])
    oneshot(str(tmp_path / "plain"), dataset=token_samples(), recipe=recipe, output_dir=tmp_path / "small")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    experts = [f"model.layers.0.block_sparse_moe.experts.{number}" for number in range(4)]
    scales = [[float(stored[f"{expert}.{part}.weight_global_scale"]) for part in ("w1", "w3")] for expert in experts]
    assert all(gate == up for gate, up in scales)
    assert len({gate for gate, _ in scales}) == 4


def test_mixtures_that_are_not_known_are_refused_with_those_that_are() -> None:
    model = tiny_model("phimoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UnsupportedModelError, match=r"holds all experts in one tensor.*deepseek_v3.*qwen3_moe"):
        oneshot(model, recipe=QuantizationModifier(scheme="W4A16", ignore=["lm_head"]))


def test_a_loaded_mixture_gives_the_same_files(tmp_path: Path) -> None:
    model = tiny_model("mixtral", **CHANGES["mixtral"])
    model.save_pretrained(tmp_path / "plain")
    recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=16)
    oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=tmp_path / "loaded")
    oneshot(str(tmp_path / "plain"), dataset=token_samples(), recipe=recipe, output_dir=tmp_path / "read")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("loaded", "read")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A row of a product then rounds by how many rows there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_mixture_is_resumed_after_a_crash(
    batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=16)

    def compress(folder: str, resume: bool = False) -> bytes:
        model = tiny_model("qwen3_moe", **CHANGES["qwen3_moe"])
        options: dict[str, Any] = {"dataset": token_samples(), "recipe": recipe, "batch_size": batch_size}
        oneshot(model, output_dir=tmp_path / folder, resume=resume, **options)
        return (tmp_path / folder / "model.safetensors").read_bytes()

    whole = compress("whole")
    with monkeypatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            compress("broken")
    assert compress("broken", resume=True) == whole
