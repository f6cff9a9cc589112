"""What cannot be served right is refused by name before a tensor is read; what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES as NATIVE_CASES
from harness import load, save_random
from safetensors.torch import load_file, save_file
from test_transformers_route import CASES as ROUTE_CASES
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3nTextConfig,
    JambaConfig,
    Llama4TextConfig,
    MambaConfig,
    MptConfig,
    PreTrainedConfig,
    RobertaConfig,
    RwkvConfig,
    T5Config,
)

from octavo.checkpoint.base import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError, UserError
from octavo.models import load_model

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "MambaForCausalLM": (MambaConfig(num_hidden_layers=2), "recurrent|AttentionInterface"),
    "RwkvForCausalLM": (RwkvConfig(num_hidden_layers=2), "recurrent|AttentionInterface"),
    "JambaForCausalLM": (JambaConfig(num_hidden_layers=4), "recurrent|layers|attention calls"),
    "BloomForCausalLM": (BloomConfig(n_layer=2), "ALiBi|AttentionInterface"),
    "MptForCausalLM": (MptConfig(n_layers=2), "ALiBi|AttentionInterface"),
    "FalconForCausalLM": (FalconConfig(num_hidden_layers=2, alibi=True), "ALiBi"),
    "DeepseekV3ForCausalLM": (DeepseekV3Config(num_hidden_layers=2, moe_layer_freq=2), "latent"),
    "Gemma3nForCausalLM": (Gemma3nTextConfig(num_hidden_layers=4), "KV cache of others"),
    "Llama4ForCausalLM": (Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
    "T5ForConditionalGeneration": (T5Config(), "no causal language model"),
    "BartForCausalLM": (BartConfig(), "encoder-decoder|AttentionInterface|positions"),
    "BertLMHeadModel": (BertConfig(num_hidden_layers=2, is_decoder=False), "not causal"),
    "RobertaForCausalLM": (RobertaConfig(num_hidden_layers=2, is_decoder=True), "positions"),
    "LlamaForSequenceClassification": (NATIVE_CASES["llama"], "not the causal language model"),
}


class Untouchable(Checkpoint):
    """A checkpoint of which nothing but the configuration may be read."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(Path("untouchable"), config, {})

    def _touched(self, *_: Any) -> Any:
        raise AssertionError("a tensor was read before the architecture was refused")

    names = tensor = weight = __contains__ = _touched


@pytest.mark.parametrize("architecture", REFUSED)
def test_architecture_is_refused_by_name_before_anything_is_read(architecture: str) -> None:
    config, reason = REFUSED[architecture]
    checkpoint = Untouchable({**config.to_dict(), "architectures": [architecture]})
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_model(checkpoint, dtype=torch.float32)
    assert architecture in str(caught.value)


def test_unknown_model_type_is_refused() -> None:
    checkpoint = Untouchable({"architectures": ["NobodyForCausalLM"], "model_type": "nobody", "auto_map": {"x": "y.z"}})
    with pytest.raises(UnsupportedModelError, match=r"NobodyForCausalLM.*'nobody'"):
        load_model(checkpoint, dtype=torch.float32)


def test_no_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        load_model(Untouchable({"model_type": "llama"}), dtype=torch.float32)


def test_native_can_be_forced_and_says_what_it_has() -> None:
    checkpoint = Untouchable({**ROUTE_CASES["opt"].to_dict(), "architectures": ["OPTForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match=r"OPTForCausalLM has no native.*LlamaForCausalLM.*transformers"):
        load_model(checkpoint, dtype=torch.float32, model_impl="native")


def test_transformers_code_is_not_deterministic() -> None:
    checkpoint = Untouchable({**ROUTE_CASES["opt"].to_dict(), "architectures": ["OPTForCausalLM"]})
    with pytest.raises(UserError, match=r"deterministic is True.*OPTForCausalLM.*LlamaForCausalLM") as caught:
        load_model(checkpoint, dtype=torch.float32, deterministic=True)
    assert caught.value.param == "deterministic"


def test_rope_that_is_not_written_natively_is_named() -> None:
    config = {**NATIVE_CASES["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}
    config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="spiral"):
        load_model(Untouchable(config), dtype=torch.float32, model_impl="native")


def test_a_rotary_share_that_the_family_ignores_is_named() -> None:
    config = {**NATIVE_CASES["llama"].to_dict(), "architectures": ["LlamaForCausalLM"], "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedModelError, match="turns whole heads, but partial_rotary_factor asks for 4 of 8"):
        load_model(Untouchable(config), dtype=torch.float32, model_impl="native")


def test_layer_kinds_of_another_number_are_named() -> None:
    config = {**NATIVE_CASES["qwen2"].to_dict(), "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
    with pytest.raises(CheckpointError, match="layer_types has 2 entries, but num_hidden_layers is 3"):
        load_model(Untouchable(config), dtype=torch.float32)


@pytest.mark.parametrize(
    "options",
    [{"model_impl": "magic"}, {"quantization": "fp7"}, {"dtype": torch.float64}],
    ids=lambda value: next(iter(value)),
)
def test_wrong_arguments_are_user_errors(options: dict[str, Any]) -> None:
    checkpoint = Untouchable({**NATIVE_CASES["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UserError, match=str(next(iter(options.values())))):
        load_model(checkpoint, **{"dtype": torch.float32, **options})


IMPLEMENTATIONS = [
    ("llama", "native", "model.layers.1.mlp.up_proj.weight"),
    ("opt", "transformers", "model.decoder.layers.1.fc1.weight"),
]


@pytest.mark.parametrize(("name", "impl", "tensor"), IMPLEMENTATIONS)
def test_missing_tensor_is_named(name: str, impl: str, tensor: str, tmp_path: Path) -> None:
    save_random({**NATIVE_CASES, **ROUTE_CASES}[name], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=tensor):
        load(tmp_path, model_impl=impl)


@pytest.mark.parametrize(("name", "impl", "tensor"), IMPLEMENTATIONS)
def test_wrong_shape_is_named_with_both_shapes(name: str, impl: str, tensor: str, tmp_path: Path) -> None:
    save_random({**NATIVE_CASES, **ROUTE_CASES}[name], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[tensor] = tensors[tensor][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{tensor}.*\[48, 31\].*\[48, 32\]"):
        load(tmp_path, model_impl=impl)


def test_incomplete_configuration_is_named(tmp_path: Path) -> None:
    save_random(NATIVE_CASES["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="hidden_size"):
        load(tmp_path)
