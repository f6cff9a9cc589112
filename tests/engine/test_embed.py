"""`LLM.embed` against sentence-transformers' definition, for encoders and for causal models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoders import CONFIGS, WORDS, expected_vectors, write_encoder, write_sentence_files
from minilm import minilm_path
from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError, UnsupportedModelError, UserError

TEXTS = ["the cat runs", "a", "a b c d e f g h i j k l m n o p q r s t u v", "the dog runs", "dog dog cat", "b"]


def vectors(outputs: list[Any]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llm(bert: Path) -> LLM:
    return LLM(str(bert))


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_encoders_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """Also past ModernBERT's window; the inputs of a batch have several lengths, and some the same."""
    folder = write_encoder(tmp_path, model_type)
    outputs = LLM(str(folder)).embed(TEXTS, use_tqdm=False)
    expected = expected_vectors(folder, [output.prompt_token_ids for output in outputs])
    assert (expected @ expected.T).min() < 0.9  # the inputs differ, so a mistake would show
    torch.testing.assert_close(vectors(outputs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("cls_token", "cls"),
        ("mean_tokens", "mean"),
        ("max_tokens", "max"),
        ("mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("lasttoken", "lasttoken"),
    ],
)
def test_poolings(flag: str, pooling: str, normalize: bool, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, pooling=flag, normalize=normalize)
    outputs = LLM(str(folder)).embed(TEXTS, use_tqdm=False)
    expected = expected_vectors(folder, [output.prompt_token_ids for output in outputs], pooling, normalize)
    torch.testing.assert_close(vectors(outputs), expected, atol=2e-5, rtol=1e-5)


def test_without_the_files_it_is_the_normalised_mean(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, pooling=None)
    outputs = LLM(str(folder)).embed(TEXTS, use_tqdm=False)
    expected = expected_vectors(folder, [output.prompt_token_ids for output in outputs])
    torch.testing.assert_close(vectors(outputs), expected, atol=1e-5, rtol=0)


def test_small_batches_give_the_same(bert: Path, llm: LLM) -> None:
    small = LLM(str(bert), max_num_batched_tokens=8, max_num_seqs=2).embed(TEXTS, use_tqdm=False)
    torch.testing.assert_close(vectors(small), vectors(llm.embed(TEXTS, use_tqdm=False)), atol=1e-5, rtol=0)


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXTS[0])
    forms = [{"prompt": TEXTS[0]}, {"prompt_token_ids": ids}, ids, TEXTS[0]]
    outputs = llm.embed(forms, use_tqdm=False)
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert outputs[0].outputs.hidden_size == 32
    torch.testing.assert_close(vectors(outputs), vectors(outputs[:1]).expand(4, -1), atol=1e-6, rtol=0)
    assert len(llm.embed(ids, use_tqdm=False)) == 1
    assert llm.embed([], use_tqdm=False) == []


def test_truncation_keeps_the_last_special_token(llm: LLM) -> None:
    long = "cat " * 100
    with pytest.raises(UserError, match=r"prompts\[0\] has 102 tokens.*at most 66.*truncate_prompt_tokens"):
        llm.embed(long)
    whole, cut = (llm.embed(long, truncate_prompt_tokens=n, use_tqdm=False)[0].prompt_token_ids for n in (-1, 5))
    assert len(whole) == 66
    assert cut == [2, *[WORDS.index("cat")] * 3, 3]
    assert len(llm.embed([[7] * 100], truncate_prompt_tokens=4, use_tqdm=False)[0].prompt_token_ids) == 4


def test_prompts_and_lower_case(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    prompts = {"prompts": {"query": "the dog ", "document": ""}, "default_prompt_name": "query"}
    write_sentence_files(
        folder,
        "mean_tokens",
        config_sentence_transformers_json=prompts,
        sentence_bert_config_json={"max_seq_length": 7, "do_lower_case": True},
    )
    llm = LLM(str(folder))
    by_default, plain = (llm.embed("RUNS", prompt_name=name, use_tqdm=False)[0] for name in (None, "document"))
    assert len(by_default.prompt_token_ids) == 5
    assert plain.prompt_token_ids == llm.get_tokenizer().encode("runs")
    with pytest.raises(UserError, match="prompt_name is 'passage'; the model has query, document"):
        llm.embed("a", prompt_name="passage")
    with pytest.raises(UserError, match=r"has 8 tokens; .* takes at most 7"):
        llm.embed("a b c d")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty text"),
        ([[]], "is empty"),
        ([[99999]], "token id 99999"),
        ([[-1]], "token id -1"),
        (["a", 3.5], "a prompt is 3.5"),
        ([{"text": "a"}], "must be text, token ids"),
        (7, "prompts is 7"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.embed(prompt, use_tqdm=False)


def test_an_encoder_generates_nothing(llm: LLM, bert: Path) -> None:
    with pytest.raises(UserError, match="embeddings only"):
        llm.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="is an encoder"):
        LLM(str(bert), runner="generate")
    with pytest.raises(UserError, match="block_size is 32, which has no meaning"):
        LLM(str(bert), block_size=32)
    with pytest.raises(UserError, match="at most 66"):
        LLM(str(bert), max_model_len=67)


def test_matryoshka(tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(UserError, match=r"dimensions is 8, but .* shorter than its 32 numbers"):
        llm.embed("a", dimensions=8)
    folder = write_encoder(tmp_path, matryoshka_dimensions=[8, 16])
    nested = LLM(str(folder))
    whole, cut = (np.array(nested.embed("the cat", dimensions=n, use_tqdm=False)[0].outputs.embedding) for n in (32, 8))
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    with pytest.raises(UserError, match="gives 8, 16"):
        nested.embed("a", dimensions=9)


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, pooling="weightedmean_tokens")
    with pytest.raises(UnsupportedModelError, match="pooling weightedmean"):
        LLM(str(folder))
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match="stage 'Dense'"):
        LLM(str(folder))
    (folder / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules.json cannot be read"):
        LLM(str(folder))


def test_missing_weights_are_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_encoder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing.*encoder.layer.1.output.dense.weight"):
        LLM(str(folder))


def last_states(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([sequence])).last_hidden_state[0, -1] for sequence in ids]
    return torch.nn.functional.normalize(torch.stack(rows), dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},  # chunked prefill
        {"enable_prefix_caching": False, "runner": "pooling"},
        {"async_scheduling": True},  # the runner that keeps its state on the device
    ],
)
def test_causal_models_give_their_last_token(tiny_llama: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(tiny_llama), dtype="float32", **options)
    texts = ["Hello there", "a", "The quick brown fox " * 8, "The quick brown fox " * 8 + "jumps", "Hello"]
    outputs = llm.embed(texts, use_tqdm=False)
    expected = last_states(tiny_llama, [output.prompt_token_ids for output in outputs])
    torch.testing.assert_close(vectors(outputs), expected, atol=1e-5, rtol=0)
    again = llm.embed(texts, use_tqdm=False)
    assert (again[2].num_cached_tokens > 0) == options.get("enable_prefix_caching", True)
    torch.testing.assert_close(vectors(again), expected, atol=1e-5, rtol=0)


def test_a_causal_model_embeds_a_full_context_and_still_generates(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), dtype="float32", max_model_len=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    before = llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].token_ids
    ids = [list(range(3, 67))]
    torch.testing.assert_close(vectors(llm.embed(ids, use_tqdm=False)), last_states(tiny_llama, ids), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"has 65 tokens; .* at most 64"):
        llm.embed([list(range(3, 68))])
    assert llm.generate("Hello", greedy, use_tqdm=False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_bodies_without_an_output_layer(tiny_llama: Path, tmp_path: Path, architecture: str, prefix: str) -> None:
    """Saved by AutoModel, or renamed to the whole model's class as Qwen3-Embedding is, with or without the prefix."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "body"
    shutil.copytree(tiny_llama, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {n.replace("model.", prefix, 1): t for n, t in tensors.items() if not n.startswith("lm_head")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(str(folder), dtype="float32")
    ids = [[5, 6, 7], [9] * 20]
    torch.testing.assert_close(vectors(llm.embed(ids, use_tqdm=False)), last_states(tiny_llama, ids), atol=1e-5, rtol=0)
    if architecture == "LlamaModel":
        with pytest.raises(UserError, match="embeddings only"):
            llm.generate("a")
        with pytest.raises(UserError, match="saved without its output layer"):
            LLM(str(folder), runner="generate")


def test_runner_settles_what_a_causal_model_does(tiny_llama: Path) -> None:
    with pytest.raises(UserError, match="makes no embeddings"):
        LLM(str(tiny_llama), dtype="float32", runner="generate").embed("a")
    with pytest.raises(UserError, match="embeddings only"):
        LLM(str(tiny_llama), dtype="float32", runner="pooling").generate("a")


@pytest.mark.slow
def test_the_real_minilm() -> None:
    """all-MiniLM-L6-v2 on 200 texts of up to its 256 tokens."""
    folder = minilm_path()
    texts = [f"Item {i}: " + "the quick brown fox jumps over the lazy dog, " * (i % 23) for i in range(200)]
    llm = LLM(str(folder))
    assert llm.engine.info.max_model_len == 256
    outputs = llm.embed(texts, use_tqdm=False)
    expected = expected_vectors(folder, [output.prompt_token_ids for output in outputs])
    torch.testing.assert_close(vectors(outputs), expected, atol=1e-5, rtol=0)
    assert (vectors(outputs) * expected).sum(1).min() > 0.99999
