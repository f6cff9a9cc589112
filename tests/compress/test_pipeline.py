"""Whole compressions of small random models of several families, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_models import tiny_model, token_samples
from torch import nn

from octavo.compress.blocks import find_blocks
from octavo.compress.checkpoint_source import CheckpointSource
from octavo.compress.loaded_source import LoadedSource
from octavo.compress.oneshot import oneshot
from octavo.compress.open_source import open_source
from octavo.compress.walker import BlockWalker
from octavo.errors import CheckpointError, UnsupportedModelError, UserError
from octavo.modifiers import GPTQModifier, QuantizationModifier

FAMILIES = ("llama", "qwen2", "qwen3", "opt", "gemma2", "gpt_neox", "phi3")


def logits(model: Any, ids: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_walking_the_blocks_is_running_the_model(family: str) -> None:
    model = tiny_model(family, pad_token_id=0)
    batches = [torch.tensor(token_samples(2, 24)), torch.tensor(token_samples(1, 17, seed=9))]
    blocks = find_blocks(model)
    walker = BlockWalker(model, blocks)
    walker.start(batches)
    with torch.no_grad():
        for index in range(len(blocks.modules)):
            for batch in range(len(batches)):
                walker.advance(index, batch)
        last: list[torch.Tensor] = []
        hook = blocks.modules[-1].register_forward_hook(
            lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
        )
        for batch in batches:
            model(batch, use_cache=False)
        hook.remove()
    for walked, direct in zip(walker.hidden, last, strict=True):
        torch.testing.assert_close(walked, direct)


def test_layers_that_share_an_input_are_found() -> None:
    model = tiny_model("llama")
    walker = BlockWalker(model, find_blocks(model))
    walker.start([torch.tensor(token_samples(1, 8))])
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    assert walker.groups == [attention, ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize(
    ("modifier", "layer_bytes"),
    [
        (GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=32), 0.5),
        (QuantizationModifier(scheme="W8A16", ignore=["lm_head"]), 1),
        (GPTQModifier(scheme="W8A8", ignore=["lm_head"]), 1),
    ],
    ids=["gptq-w4a16", "rtn-w8a16", "gptq-w8a8"],
)
def test_the_checkpoint_loads_in_transformers_with_the_same_logits(
    family: str, modifier: Any, layer_bytes: float, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family)
    changed = oneshot(model, dataset=token_samples(), recipe=modifier, output_dir=tmp_path)
    assert changed is model
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = token_samples(2, 24, seed=11)
    found, expected = logits(loaded, ids), logits(changed, ids)
    # W8A8 also rounds activations when it runs, which the changed weights alone do not.
    tolerance = 0.05 if "W8A8" in str(modifier.scheme) else 1e-3
    assert float((found - expected).norm() / expected.norm()) < tolerance
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    codes = [t for name, t in stored.items() if name.endswith("weight_packed") or t.dtype == torch.int8]
    weights = sum(module.weight.numel() for module in _block_linears(model))
    assert sum(t.numel() * t.element_size() for t in codes) == weights * layer_bytes


def _block_linears(model: Any) -> list[nn.Linear]:
    blocks = find_blocks(model)
    return [module for index in range(len(blocks.modules)) for _, module in blocks.linears(index)]


def compress(model: Any, recipe: Any, output_dir: Path | None = None, **arguments: Any) -> Any:
    return oneshot(model, dataset=token_samples(), recipe=recipe, output_dir=output_dir, **arguments)


def test_checkpoint_and_loaded_model_give_the_same_files(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = "quant_stage:\n  quant_modifiers:\n    GPTQModifier: {scheme: W4A16, ignore: [lm_head], group_size: 32}\n"
    oneshot(str(tiny_llama), dataset=token_samples(), recipe=recipe, output_dir=tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tiny_llama)
    compress(loaded, recipe, tmp_path / "b")
    for name in ("model.safetensors", "recipe.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    report = json.loads((tmp_path / "a" / "compression_report.json").read_text())
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    assert 0 <= size - report["size"]["after_bytes"] < 20_000  # the file's header
    assert sum(part["after_bytes"] for part in report["size"]["parts"]) == report["size"]["after_bytes"]


def test_save_pretrained_after_oneshot_writes_the_compressed_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = compress(tiny_model("llama"), GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=32))
    model.save_pretrained(tmp_path / "packed", save_compressed=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    ids = token_samples(2, 16, seed=4)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path / "dense", save_compressed=False)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(dense, ids), logits(model, ids))


def test_one_batch_and_many_agree_in_kind() -> None:
    """Many batches see the block's own unquantized outputs, so codes may differ, but not by much."""
    recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"], group_size=32)
    original = tiny_model("llama")
    ids = token_samples(3, 24, seed=8)
    base = logits(original, ids)
    distances = []
    for arguments in ({}, {"batch_size": 1}, {"batch_size": 4}):
        changed = compress(tiny_model("llama"), recipe, **arguments)
        distances.append(float((logits(changed, ids) - base).norm() / base.norm()))
    assert max(distances) < 0.6
    assert max(distances) < 1.5 * min(distances)


def test_tied_embeddings_stay_tied_and_unquantized(tmp_path: Path) -> None:
    model = compress(tiny_model("llama", tie_word_embeddings=True), QuantizationModifier(scheme="W8A16"), tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert "model.embed_tokens.weight" in names
    assert not [name for name in names if name.startswith("lm_head")]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    report = json.loads((tmp_path / "compression_report.json").read_text())
    assert any("lm_head shares its weight with the input embeddings" in note for note in report["notes"])


def test_group_size_falls_back_layer_by_layer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", hidden_size=64, intermediate_size=256)
    compress(model, QuantizationModifier(scheme="W4A16", ignore=["lm_head"]), tmp_path)
    report = json.loads((tmp_path / "compression_report.json").read_text())
    sizes = {layer["name"].rpartition(".")[2]: layer["group_size"] for layer in report["layers"]}
    assert sizes == dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 64) | {
        "down_proj": 128
    }
    assert "group size 128 does not divide 64 inputs: 12 layers use 64 instead" in report["notes"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = token_samples(1, 16)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-3, atol=1e-3)


def test_group_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(UserError, match="48 inputs, which group size 128 does not divide"):
        compress(tiny_model("llama", intermediate_size=48), QuantizationModifier(scheme="W4A16", ignore=["lm_head"]))


def test_two_modifiers_share_the_layers_or_are_refused(tmp_path: Path) -> None:
    mlp, attention = "re:.*mlp", "re:.*self_attn"
    eight = QuantizationModifier(targets=[attention], scheme="W8A16")
    compress(tiny_model("llama"), [eight, GPTQModifier(targets=[mlp], scheme="W4A16", group_size=32)], tmp_path)
    report = json.loads((tmp_path / "compression_report.json").read_text())
    bits = {(layer["name"].split(".")[3], layer["num_bits"], layer["algorithm"]) for layer in report["layers"]}
    assert bits == {("self_attn", 8, "rtn"), ("mlp", 4, "gptq")}
    with pytest.raises(UserError, match="is a target of QuantizationModifier and GPTQModifier"):
        compress(tiny_model("llama"), [eight, GPTQModifier(scheme="W4A16", group_size=32, ignore=["lm_head"])])


def test_non_finite_weights_are_named() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has 1 values that are not finite"
    ):
        compress(model, QuantizationModifier(scheme="W8A16", ignore=["lm_head"]))


def test_models_that_are_no_chain_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    recipe = QuantizationModifier(scheme="W8A16", ignore=["lm_head"])
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        compress(t5, recipe)
    shared = tiny_model("llama")
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UnsupportedModelError, match="is the same weight as"):
        compress(shared, recipe)


class _Between(nn.Module):
    """A decoder that does something between its blocks, or hands results of one block to the next."""

    def __init__(self, model: Any, how: str) -> None:
        super().__init__()
        self.layers, self.embed_tokens, self.rotary_emb = model.layers, model.embed_tokens, model.rotary_emb
        self.how = how

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        before = None
        for layer in self.layers:
            extra = {"before": before} if self.how == "shared" else {}
            output = layer(hidden, position_embeddings=rotary, **extra)
            before = output
            hidden = output * 1.5 if self.how == "between" else output
        return hidden


@pytest.mark.parametrize(("how", "reason"), [("between", "changes the hidden states"), ("shared", "beside the hidden")])
def test_hidden_dependencies_between_blocks_are_detected(how: str, reason: str) -> None:
    model = tiny_model("llama")
    model.model = _Between(model.model, how)
    with pytest.raises(UnsupportedModelError, match=reason):
        compress(model, GPTQModifier(scheme="W4A16", group_size=32, ignore=["lm_head"]))


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="no tokenizer for this model; give tokenizer"):
        oneshot(tiny_model("llama"), dataset=["some text"], recipe=GPTQModifier(scheme="W8A16", ignore=["lm_head"]))


@pytest.mark.parametrize("name", ["no/such", "."])
def test_a_tokenizer_that_is_not_there_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no model 'no/such'" if name == "no/such" else "holds no tokenizer"):
        oneshot(tiny_model("llama"), tokenizer=name, recipe=GPTQModifier(scheme="W8A16", ignore=["lm_head"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_every_family_are_filled_block_by_block(family: str, tmp_path: Path) -> None:
    """The empty model, filled from the file, computes what the loaded one does, buffers and all."""
    model = tiny_model(family, pad_token_id=0)
    model.save_pretrained(tmp_path)
    source = open_source(str(tmp_path), tokenizer="none", keep=True)
    assert isinstance(source, LoadedSource if family == "gpt_neox" else CheckpointSource)
    source.fill(source.model, "")
    ids = token_samples(2, 24, seed=5)
    torch.testing.assert_close(logits(source.model, ids), logits(model, ids))
    if family != "gpt_neox":  # whose output layer is called embed_out there
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            assert {name for name, _ in source.stored("")} == set(file.keys())


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family)
    lost = next(name for name in model.state_dict() if "norm" in name)
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if k != lost})
    capfd.readouterr()
    with pytest.raises(CheckpointError, match="lacks"):
        open_source(str(tmp_path), tokenizer="none")
    said = capfd.readouterr()
    assert "MISSING" not in said.out + said.err + caplog.text  # transformers' load report


def test_a_group_size_that_was_asked_for_and_fits_no_layer_is_refused() -> None:
    with pytest.raises(UserError, match=r"group size 40 divides the inputs of no layer; they have [\d, ]+\. Give"):
        compress(tiny_model("llama"), QuantizationModifier(scheme="W4A16", ignore=["lm_head"], group_size=40))


def test_a_group_size_that_fits_nothing_is_found_before_a_model_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    monkeypatch.setattr("octavo.compress.open_source._load_whole", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="group size 7 does not divide"):
        oneshot(str(tmp_path), recipe=QuantizationModifier(scheme="W4A16", group_size=7))


def test_the_model_itself_is_no_output_folder(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = QuantizationModifier(scheme="W8A16", ignore=["lm_head"])
    with pytest.raises(UserError, match="is the model itself"):
        oneshot(str(tiny_llama), recipe=recipe, output_dir=tiny_llama)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made: it is a file; name another"):
        oneshot(str(tiny_llama), recipe=recipe, output_dir=tmp_path / "file")
    with pytest.raises(UserError, match=r"file/below cannot be made: Not a directory; name another with --output-dir"):
        oneshot(str(tiny_llama), recipe=recipe, output_dir=tmp_path / "file" / "below")


def test_recipe_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="match no linear layer"):
        compress(tiny_model("llama"), QuantizationModifier(targets=["re:.*nothing"], scheme="W8A16"))


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_sequence_length"):
        oneshot("demo", recipe=QuantizationModifier(scheme="W8A16"), max_sequence_length=5)  # type: ignore[call-arg]
