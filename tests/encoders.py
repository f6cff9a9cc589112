"""Small random encoders on disk, with the files of sentence-transformers, and what they should give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the", "cat", "dog", "runs"]
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "global_rope_theta": 1000.0},
    "roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "mpnet": {},
}
_SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,  # RoBERTa's positions begin after it
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}


def write_encoder(
    folder: Path,
    model_type: str = "bert",
    *,
    pooling: str | None = "mean_tokens",
    normalize: bool = True,
    **fields: Any,
) -> Path:
    """A model with weights so large that a wrong mask or position shows, and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    settings = AutoConfig.for_model(model_type, **_SIZES | CONFIGS[model_type] | fields)
    model = AutoModel.from_config(settings, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    vocab = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    if pooling is not None:
        write_sentence_files(folder, pooling, normalize)
    return folder


def write_sentence_files(folder: Path, pooling: str, normalize: bool = True, **extra: Any) -> None:
    """`pooling` is the flag's name after pooling_mode_; `extra` are further files, by name with _ for the dot."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True},
        **{name.replace("_json", ".json"): content for name, content in extra.items()},
    }
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(content), encoding="utf-8")


def expected_vectors(folder: Path, ids: list[list[int]], pooling: str = "mean", normalize: bool = True) -> Tensor:
    """sentence-transformers' definition, one input at a time through plain transformers in float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for sequence in ids:
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([sequence])).last_hidden_state[0]
        mean = hidden.mean(0)
        by_kind = {"mean": mean, "cls": hidden[0], "lasttoken": hidden[-1], "max": hidden.max(0).values}
        rows.append(by_kind.get(pooling, mean * len(sequence) ** 0.5))
    stacked = torch.stack(rows)
    return torch.nn.functional.normalize(stacked, dim=1) if normalize else stacked
