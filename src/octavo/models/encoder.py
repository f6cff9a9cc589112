"""Bidirectional encoders (BERT and its relatives) without padding, through transformers' own modules.

The sequences of a batch are packed into one row [1, T]; positions are given explicitly, and attention, which alone
looks across tokens, comes back here through `AttentionInterface` and takes sequences of equal length together. An
architecture that attends in its own code gets batches of equal length instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.dummy import DummyCheckpoint
from octavo.errors import CheckpointError, UnsupportedModelError

IMPLEMENTATION = "octavo_packed"


@dataclass(frozen=True)
class EncoderFamily:
    """`is_packed`: attention goes through AttentionInterface. `begins_after_pad`: so do RoBERTa's position ids."""

    is_packed: bool = True
    begins_after_pad: bool = False


FAMILIES = {
    "bert": EncoderFamily(),
    "distilbert": EncoderFamily(),
    "electra": EncoderFamily(),
    "modernbert": EncoderFamily(),
    "roberta": EncoderFamily(begins_after_pad=True),
    "camembert": EncoderFamily(begins_after_pad=True),
    "xlm-roberta": EncoderFamily(begins_after_pad=True),
    "mpnet": EncoderFamily(is_packed=False, begins_after_pad=True),
}
_BODIES = ("Model", "ForMaskedLM", "ForPreTraining")  # classes whose body is the encoder that embeddings come from


def is_encoder(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an encoder, which has no next token to give."""
    return config.get("model_type") in FAMILIES


class Encoder(nn.Module):
    """An encoder with its weights; `max_position` tokens a sequence at most."""

    def __init__(self, model: Any, family: EncoderFamily) -> None:
        super().__init__()
        config = model.config
        self.model, self.family = model.eval(), family
        self.hidden_size, self.vocab_size = int(config.hidden_size), int(config.vocab_size)
        self._first_position = config.pad_token_id + 1 if family.begins_after_pad else 0
        self.max_position = int(config.max_position_embeddings) - self._first_position
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    def forward(self, sequences: list[list[int]]) -> Tensor:
        """Token ids of `n` sequences, best sorted by length -> hidden rows [T, H], those of one after the other."""
        runs = [(length, list(run)) for length, run in groupby(sequences, key=len)]
        if self.family.is_packed:
            return self._forward_packed(runs)
        rows = [self.model(input_ids=self._ids(run)).last_hidden_state.flatten(0, 1) for _, run in runs]
        return torch.cat(rows)

    def _forward_packed(self, runs: list[tuple[int, list[list[int]]]]) -> Tensor:
        ids = torch.cat([self._ids(run).flatten() for _, run in runs])
        positions = torch.cat([torch.arange(length).repeat(len(run)) for length, run in runs]).to(self.device)
        out = self.model(
            input_ids=ids[None],
            position_ids=positions[None] + self._first_position,
            octavo_runs=[(length, len(run)) for length, run in runs],
        )
        return out.last_hidden_state[0]

    def _ids(self, sequences: list[list[int]]) -> Tensor:
        return torch.tensor(sequences, device=self.device)

    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    octavo_runs: list[tuple[int, int]],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function behind `IMPLEMENTATION`: [1, heads, T, D] each -> [1, T, heads, D].

    `octavo_runs` are (length, number of sequences), in the order of the rows. A token sees those of its own sequence
    that are less than `sliding_window` away, all without one.
    """
    outputs, start = [], 0
    for length, count in octavo_runs:
        end = start + length * count
        q, k, v = (t[0, :, start:end].unflatten(1, (count, length)).transpose(0, 1) for t in (query, key, value))
        mask = None
        if sliding_window is not None and length > sliding_window:
            place = torch.arange(length, device=q.device)
            mask = (place[:, None] - place).abs() < sliding_window
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(outputs)[None], None


def load_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Encoder:
    """The encoder of a checkpoint with its weights. Safetensors only; code of a checkpoint is never run.

    Raises UnsupportedModelError for other architectures, CheckpointError for missing weights.
    """
    architecture = str((checkpoint.config.get("architectures") or ["Model"])[0])
    family = FAMILIES[checkpoint.config["model_type"]]
    if not architecture.endswith(_BODIES) or checkpoint.config.get("is_decoder"):
        raise UnsupportedModelError(
            f"{architecture} is no encoder for embeddings; those are classes whose names end in {', '.join(_BODIES)}"
        )
    arguments: dict[str, Any] = {"dtype": dtype}
    if family.is_packed:
        from transformers import AttentionInterface

        AttentionInterface.register(IMPLEMENTATION, packed_attention)
        arguments["attn_implementation"] = IMPLEMENTATION
    return Encoder(_build(checkpoint, arguments).to(device), family)


def _build(checkpoint: Checkpoint, arguments: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging as transformers_logging

    path = checkpoint.path
    if isinstance(checkpoint, DummyCheckpoint):
        return AutoModel.from_config(AutoConfig.from_pretrained(path, local_files_only=True), **arguments)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it tells of heads that are not used; what is missing is checked here
    transformers_logging.disable_progress_bar()
    try:
        model, found = AutoModel.from_pretrained(
            path, local_files_only=True, use_safetensors=True, output_loading_info=True, **arguments
        )
    except Exception as error:  # transformers raises whatever its readers do
        raise CheckpointError(f"{path}: the encoder cannot be loaded: {error}") from error
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing or found["mismatched_keys"]:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors are missing or of another shape than config.json asks for: "
            f"{', '.join(map(str, [*missing, *found['mismatched_keys']][:3]))}"
        )
    return model
