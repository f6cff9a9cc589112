"""Any readable checkpoint -> plain safetensors that every loader reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.reader import open_checkpoint
from octavo.checkpoint.shards import SHARD_BYTES, ShardWriter, write_json
from octavo.checkpoint.transforms import refuse_online_transforms
from octavo.errors import CheckpointError, UserError
from octavo.folders import output_folder
from octavo.progress import Progress

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def convert(
    model: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the model to `output_dir`: safetensors of `dtype`, config.json, tokenizer files, generation_config.json.

    Quantized weights are dequantized. Returns the directory. UserError for an unknown dtype or for the model's own
    directory as the output, CheckpointError for a broken model.
    """
    name, torch_dtype = _dtype(dtype)
    checkpoint = open_checkpoint(model)
    refuse_online_transforms(checkpoint.config, checkpoint.path, "a plain checkpoint")
    directory = Path(output_dir)
    if directory.resolve() == checkpoint.path.resolve():
        raise UserError(f"the output directory {directory} is the model itself; name another one", param="output_dir")
    # First what can fail early: a model without a tokenizer is of little use.
    output_folder(directory)
    checkpoint.save_tokenizer(directory)
    _write_weights(checkpoint, directory, torch_dtype, max_shard_bytes)
    if checkpoint.generation_config:
        write_json(directory / "generation_config.json", checkpoint.generation_config)
    # Last, since a directory with a config counts as a whole checkpoint.
    write_json(directory / "config.json", _config(checkpoint, name))
    return directory


def _dtype(dtype: str | torch.dtype) -> tuple[str, torch.dtype]:
    name = str(dtype).removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}", param="dtype")
    return name, DTYPES[name]


def _config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    dropped = (*QUANTIZATION_KEYS, "torch_dtype", "dtype")
    config = {key: value for key, value in checkpoint.config.items() if key not in dropped}
    return config | {"torch_dtype": dtype}


def _write_weights(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    writer = ShardWriter(directory, max_shard_bytes)
    names = checkpoint.names()
    with Progress(len(names), "converting") as progress:
        for name in names:
            writer.add(name, _converted(checkpoint, name, dtype))
            progress.advance()
    writer.close()


def _converted(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = checkpoint.tensor(name)
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} is not finite in {dtype}; use --dtype float32 or another file"
        )
    return tensor
