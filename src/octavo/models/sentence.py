"""How a checkpoint turns hidden rows into one vector a text: the files that sentence-transformers writes beside it.

`modules.json` lists the stages (Transformer, Pooling, Normalize); `1_Pooling/config.json`, `sentence_bert_config.json`
and `config_sentence_transformers.json` hold their settings. Reimers and Gurevych 2019, arXiv 1908.10084.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError, UnsupportedModelError

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len", "lasttoken")
_MODULES = ("Transformer", "Pooling", "Normalize")
# the older form of 1_Pooling/config.json has one flag a kind
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class SentenceConfig:
    """What the files say; `max_seq_length` is None where they set no limit beside the model's own positions."""

    pooling: str
    is_normalized: bool
    max_seq_length: int | None = None
    lowercases: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


def read_sentence_config(path: Path, default_pooling: str) -> SentenceConfig:
    """The settings of the checkpoint in the directory `path`.

    Without modules.json (or for a single file) it is `default_pooling`, normalised. Raises UnsupportedModelError for
    stages and poolings that are not computed here, CheckpointError for files that cannot be read.
    """
    modules = _read_json(path / "modules.json")
    if modules is None:
        return SentenceConfig(default_pooling, True)
    stages = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    unknown = next((name for name in stages if name not in _MODULES), None)
    if unknown is not None:
        raise UnsupportedModelError(
            f"{path}/modules.json has a stage {unknown!r}; embeddings are made by {', '.join(_MODULES)} here"
        )
    if stages.get("Transformer"):
        raise UnsupportedModelError(
            f"{path}/modules.json has the transformer in {stages['Transformer']!r}; move its files beside modules.json"
        )
    lengths: dict[str, Any] = next(filter(None, (_read_json(path / name) for name in _LENGTH_FILES)), {})
    prompts = _read_json(path / "config_sentence_transformers.json") or {}
    return SentenceConfig(
        pooling=_read_pooling(path / stages["Pooling"]) if "Pooling" in stages else default_pooling,
        is_normalized="Normalize" in stages,
        max_seq_length=lengths.get("max_seq_length"),
        lowercases=bool(lengths.get("do_lower_case")),
        prompts=prompts.get("prompts") or {},
        default_prompt_name=prompts.get("default_prompt_name"),
    )


def pool(hidden: Tensor, lengths: list[int], kind: str) -> Tensor:
    """Packed rows [T, H] of sequences of these lengths -> float32 [n, H], one row a sequence."""
    sizes = torch.tensor(lengths, device=hidden.device)
    ends = sizes.cumsum(0)
    if kind == "cls":
        return hidden[ends - sizes].float()
    if kind == "lasttoken":
        return hidden[ends - 1].float()
    if kind == "max":
        return torch.segment_reduce(hidden.float(), "max", lengths=sizes)
    mean = torch.segment_reduce(hidden.float(), "mean", lengths=sizes)
    return mean * sizes.sqrt()[:, None] if kind == "mean_sqrt_len" else mean


def _read_pooling(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder}/config.json is missing; modules.json names it")
    mode = config.get("pooling_mode")
    kinds = [mode] if isinstance(mode, str) else mode or [kind for flag, kind in _FLAGS.items() if config.get(flag)]
    if len(kinds) != 1 or kinds[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{folder}/config.json asks for the pooling {' + '.join(kinds) or 'none'}; one of {', '.join(POOLINGS)} "
            "is computed here"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{folder}/config.json leaves the prompt out of the pooling, which is not done here"
        )
    return str(kinds[0])


def _read_json(path: Path) -> Any:
    """The content of a file, None where there is none."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
