"""Rotated and pruned models from a recipe to the served checkpoint: the same logits, exact zeros, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model, token_samples
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.checkpoint.convert import convert
from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.transforms import online_transforms
from octavo.compress.chain import check_chain
from octavo.compress.oneshot import oneshot
from octavo.compress.recipe import dump_recipe, parse_recipe
from octavo.compress.report import report_lines
from octavo.compress.work_folder import WorkFolder
from octavo.errors import UnsupportedModelError, UserError
from octavo.modifiers import (
    AWQModifier,
    ConstantPruningModifier,
    GPTQModifier,
    MagnitudePruningModifier,
    QuantizationModifier,
    QuIPModifier,
    SmoothQuantModifier,
    SparseGPTModifier,
    SpinQuantModifier,
    WandaPruningModifier,
)

TOKENS = token_samples(1, 40, seed=13)[0]
W4: dict[str, Any] = {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}


def served_logprobs(path: Path, **settings: Any) -> Tensor:
    with LLM(str(path), dtype="float32", device="cpu", skip_tokenizer_init=True, **settings) as llm:
        request = SamplingParams(max_tokens=1, prompt_logprobs=0)
        found = llm.generate([{"prompt_token_ids": TOKENS}], request, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    return torch.tensor([entry[token].logprob for entry, token in zip(found[1:], TOKENS[1:], strict=True) if entry])


def model_logprobs(model: Any) -> Tensor:
    ids = torch.tensor([TOKENS])
    with torch.inference_mode():
        return model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["spinquant", "quip"])
def test_a_rotated_model_is_served_with_its_old_logits(family: str, name: str, tmp_path: Path) -> None:
    residual = [] if family == "gemma3_text" else ["R1"]
    recipe = SpinQuantModifier(rotations=[*residual, "R2", "R4"]) if name == "spinquant" else QuIPModifier()
    model = tiny_model(family, **FAMILIES[family])
    before = model_logprobs(model)
    oneshot(model, recipe=recipe, output_dir=tmp_path)
    torch.testing.assert_close(model_logprobs(model), before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(served_logprobs(tmp_path), before, rtol=1e-3, atol=1e-3)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["transform_config"]["config_groups"]
    stored = load_file(tmp_path / "model.safetensors")
    unties = name == "spinquant" and bool(residual)
    assert ("lm_head.weight" in stored) == (family == "llama" or unties)
    if family == "qwen3":
        assert config["tie_word_embeddings"] is not unties


def test_a_rotated_mixture_is_served_with_its_old_logits(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model = tiny_model("qwen3_moe", **sizes)
    before = model_logprobs(model)
    oneshot(model, recipe=SpinQuantModifier(transform_type="random-hadamard"), output_dir=tmp_path)
    torch.testing.assert_close(served_logprobs(tmp_path), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-matrix"])
def test_all_kinds_and_outputs_are_rotated_on_both_routes(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    before = model_logprobs(model)
    recipe = QuIPModifier(rotations=["v", "u"], transform_type=kind, seed=3)
    oneshot(model, recipe=recipe, output_dir=tmp_path)
    stored = [name for name in load_file(tmp_path / "model.safetensors") if "put.weight" in name]
    assert len(stored) == (0 if kind == "hadamard" else 4)  # inputs of 64 and 32, outputs of 64 and 32 in a block
    for route in ("native", "transformers"):
        torch.testing.assert_close(served_logprobs(tmp_path, model_impl=route), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "recipe",
    [
        [SpinQuantModifier(rotations=["R1", "R2", "R4"]), QuantizationModifier(**W4)],
        [QuIPModifier(), GPTQModifier(**W4)],
        [SpinQuantModifier(), SparseGPTModifier(mask_structure="2:4"), GPTQModifier(**W4)],
    ],
    ids=["R4-rtn", "quip-gptq", "R1R2-sparsegpt-gptq"],
)
def test_a_rotated_and_quantized_model_is_served_as_it_was_calibrated(recipe: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    changed = oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=tmp_path)
    # The scales are stored in the model's float32, so the changed model is the served one.
    torch.testing.assert_close(served_logprobs(tmp_path), model_logprobs(changed), rtol=1e-3, atol=1e-3)
    text = dump_recipe(recipe)
    assert [type(m) for m in parse_recipe(text)] == [type(m) for m in recipe]
    assert dump_recipe(parse_recipe(text)) == text


@pytest.mark.parametrize("pruner", [SparseGPTModifier, WandaPruningModifier, MagnitudePruningModifier])
@pytest.mark.parametrize("quantizer", [GPTQModifier(**W4), QuantizationModifier(**W4), None], ids=["gptq", "rtn", "-"])
def test_two_of_four_stay_zero_through_a_quantizer(pruner: Any, quantizer: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    recipe = [pruner(mask_structure="2:4"), *([quantizer] if quantizer else [])]
    oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    report = json.loads((tmp_path / "compression_report.json").read_text())
    for entry in report["layers"]:
        zeros = checkpoint.tensor(f"{entry['name']}.weight") == 0
        assert bool((zeros.reshape(-1, 4).sum(dim=1) >= 2).all())
        assert (entry if quantizer is None else entry["pruning"])["sparsity"] == 0.5
    zeros_line = f"zeros in {len(report['layers'])} layers: 50.0% of their weights, 50.0% in the layer with the fewest"
    assert zeros_line in report_lines(report)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in config) == (quantizer is not None)
    if quantizer is not None:
        assert config["quantization_config"]["sparsity_config"] == {}


def test_owl_looks_at_all_blocks_first(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            if parameter.dim() == 2:
                parameter[:, ::16] *= 20
    recipe = WandaPruningModifier(sparsity=0.6, sparsity_profile="owl")
    oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=tmp_path)
    report = json.loads((tmp_path / "compression_report.json").read_text())
    assert any("owl: sparsities by block" in note for note in report["notes"])
    by_block = [[e["sparsity"] for e in report["layers"] if f"layers.{i}." in e["name"]] for i in range(3)]
    means = [sum(values) / len(values) for values in by_block]
    assert means[1] < min(means[0], means[2])
    assert sum(means) / 3 == pytest.approx(0.6, abs=0.02)


def test_an_interrupted_rotation_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(plain)
    recipe = [SpinQuantModifier(rotations=["R1", "R2", "R4"]), GPTQModifier(**W4)]
    arguments: dict[str, Any] = {"dataset": token_samples(), "recipe": recipe}
    oneshot(str(plain), output_dir=tmp_path / "whole", **arguments)
    save, calls = WorkFolder.save, []

    def interrupted(self: WorkFolder, index: int, *rest: Any) -> None:
        save(self, index, *rest)
        calls.append(index)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            oneshot(str(plain), output_dir=tmp_path / "parts", **arguments)
    assert calls == [0]
    oneshot(str(plain), output_dir=tmp_path / "parts", resume=True, **arguments)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert list(whole) == list(parts)
    assert "lm_head.weight" in whole
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def rotated_checkpoint(path: Path, recipe: Any, change: dict[str, Any]) -> None:
    """A checkpoint whose transform_config has a group changed."""
    oneshot(tiny_model("llama"), recipe=recipe, output_dir=path)
    config = json.loads((path / "config.json").read_text())
    for group in config["quantization_config"]["transform_config"]["config_groups"].values():
        group |= change
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"type": "learned"}, "random-matrix"),
        ({"type": "random-hadamard"}, "no tensor"),
        ({"randomize": True}, "randomize"),
        ({"head_dim": 48}, "power of two"),
        ({"head_dim": 64}, "divide the size"),
        ({"apply": [{"location": "k_cache", "targets": ["re:.*self_attn$"]}]}, "k_cache"),
        ({"apply": [{"location": "input", "targets": ["re:.*q_proj$"]}]}, "differently for them"),
        ({"apply": [{"location": "input", "targets": ["lm_head"]}]}, "lm_head"),
    ],
)
def test_rotations_that_are_not_done_here_are_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    rotated_checkpoint(tmp_path, SpinQuantModifier(rotations=["R4"]), change)
    with pytest.raises(UserError, match=match):
        LLM(str(tmp_path), dtype="float32", device="cpu", skip_tokenizer_init=True)


def test_a_rotation_at_run_time_is_no_plain_or_deterministic_model(tmp_path: Path) -> None:
    oneshot(tiny_model("llama"), recipe=QuIPModifier(), output_dir=tmp_path / "model")
    with pytest.raises(UserError, match="no deterministic kernel"):
        LLM(str(tmp_path / "model"), dtype="float32", device="cpu", skip_tokenizer_init=True, deterministic=True)
    with pytest.raises(UnsupportedModelError, match="at run time"):
        convert(tmp_path / "model", tmp_path / "plain")
    with pytest.raises(UnsupportedModelError, match="compressing its weights again would change"):
        oneshot(str(tmp_path / "model"), recipe=QuantizationModifier(**W4))


def test_weights_alone_are_not_saved_without_their_rotations(tmp_path: Path) -> None:
    model = oneshot(tiny_model("llama"), recipe=QuIPModifier(transform_type="random-hadamard"))
    before = model_logprobs(model)
    with pytest.raises(UnsupportedModelError, match="saving its weights alone"):
        model.save_pretrained(tmp_path, save_compressed=False)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(served_logprobs(tmp_path), before, rtol=1e-3, atol=1e-3)


def test_compressed_tensors_reads_the_transform_config(tmp_path: Path) -> None:
    transform = pytest.importorskip("compressed_tensors.transform")
    model = tiny_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    oneshot(model, recipe=QuIPModifier(rotations=["v", "u"]), output_dir=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["transform_config"]
    again = tiny_model("llama")
    transform.apply_transform_config(again, transform.TransformConfig.model_validate(config))
    for name, value in load_file(tmp_path / "model.safetensors").items():
        found = again.state_dict()[name]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
        if name.endswith("down_proj.weight"):
            assert not torch.allclose(value, before[name])
    assert len(online_transforms(json.loads((tmp_path / "config.json").read_text()), tmp_path)) == len(
        config["config_groups"]
    )


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ([GPTQModifier(**W4), SpinQuantModifier()], "put SpinQuantModifier before GPTQModifier"),
        ([GPTQModifier(**W4), WandaPruningModifier(sparsity=0.5)], "put WandaPruningModifier before GPTQModifier"),
        ([SparseGPTModifier(sparsity=0.5), QuIPModifier()], "put QuIPModifier before SparseGPTModifier"),
        ([SpinQuantModifier(), SpinQuantModifier()], "2 of SpinQuantModifier"),
        ([SpinQuantModifier(rotations=["R4"]), QuIPModifier()], "leave R4 out"),
        ([SpinQuantModifier(), ConstantPruningModifier()], "mixes them"),
        ([QuIPModifier(), SparseGPTModifier(sparsity=0.5, preserve_sparsity_mask=True)], "mixes them"),
        ([SpinQuantModifier(), WandaPruningModifier(sparsity=0.5, sparsity_profile="owl")], "as it comes"),
    ],
)
def test_senseless_chains_are_refused(recipe: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        oneshot(tiny_model("llama"), dataset=token_samples(), recipe=recipe)


def test_scalings_go_after_rotations_that_are_fused() -> None:
    check_chain([SpinQuantModifier(), SmoothQuantModifier(), SparseGPTModifier(sparsity=0.5), GPTQModifier(**W4)])
    check_chain([AWQModifier(), QuantizationModifier(**W4), GPTQModifier(**W4)])
    for chain, match in (
        ([SmoothQuantModifier(), SpinQuantModifier(), GPTQModifier(**W4)], "put the rotation first"),
        ([SpinQuantModifier(rotations=["R4"]), AWQModifier(), GPTQModifier(**W4)], "would change the model"),
        ([QuIPModifier(), SmoothQuantModifier(), GPTQModifier(**W4)], "would change the model"),
        ([SmoothQuantModifier(), AWQModifier(), GPTQModifier(**W4)], "the same channels"),
        ([AWQModifier(), SparseGPTModifier(sparsity=0.5)], "none follows it"),
        ([GPTQModifier(**W4), AWQModifier()], "put AWQModifier before GPTQModifier"),
    ):
        with pytest.raises(UserError, match=match):
            check_chain(chain)


def test_a_rotated_and_smoothed_model_has_its_old_logits(tmp_path: Path) -> None:
    model = tiny_model("qwen3", head_dim=16, tie_word_embeddings=True)
    before = model_logprobs(model)
    recipe = [SpinQuantModifier(transform_type="random-hadamard"), SmoothQuantModifier(smoothing_strength=0.8)]
    oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=tmp_path)
    torch.testing.assert_close(served_logprobs(tmp_path), before, rtol=1e-3, atol=1e-3)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_constant_pruning_keeps_the_zeros_of_a_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:, ::3] = 0
    oneshot(model, dataset=token_samples(), recipe=[ConstantPruningModifier(), GPTQModifier(**W4)], output_dir=tmp_path)
    weight = open_checkpoint(tmp_path).tensor("model.layers.0.mlp.up_proj.weight")
    assert bool((weight[:, ::3] == 0).all())
    assert bool((weight[:, 1::3] != 0).any())
