"""`oneshot`: compress a model in one call, with LLM Compressor's argument names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.reader import load_tokenizer
from octavo.compress.calibration import CalibrationSpec
from octavo.compress.job import CompressionJob, plan_of
from octavo.compress.open_source import open_source
from octavo.compress.recipe import parse_recipe
from octavo.errors import UserError


def oneshot(
    model: Any,
    dataset: Any = None,
    dataset_config_name: str | None = None,
    recipe: Any = None,
    output_dir: str | Path | None = None,
    *,
    tokenizer: Any = None,
    splits: str | None = None,
    text_column: str = "text",
    num_calibration_samples: int = 128,
    max_seq_length: int | None = None,
    shuffle_calibration_samples: bool = False,
    concatenate_data: bool | None = None,
    streaming: bool = False,
    batch_size: int | None = None,
    seed: int = 0,
    resume: bool = False,
    device: str = "auto",
    moe_calibrate_all_experts: bool = True,
) -> Any:
    """Compress `model` as `recipe` says, write it to `output_dir` if that is given, and return the changed model.

    model: what Octavo reads (directory, .gguf file, Hugging Face id, "demo") or a loaded PreTrainedModel, which is
    changed in place. recipe: a modifier of `octavo.modifiers`, a list of them, YAML, or a YAML file's path. dataset: a
    name on the Hub, a file, a datasets.Dataset, or a list of texts; the built-in text without one. tokenizer: a
    directory, an id or a tokenizer, by default the model's. max_seq_length: tokens a sequence,
    by default 512 or the model's context if that is shorter. batch_size: sequences a forward pass; by default all at
    once where they are of one length and fit, else some. device: "cuda", "cpu", or "auto", the GPU where there is one;
    only the block in hand, its statistics and the activations are there. moe_calibrate_all_experts: experts are
    calibrated on all tokens, else on those that are sent to them. resume goes on after the blocks that an interrupted
    call finished in `output_dir`. After this, `model.save_pretrained(directory)` writes the compressed checkpoint as
    well.

    Raises UserError for whatever is wrong with the arguments, the model or the data; an unknown keyword is a TypeError.
    """
    if recipe is None:
        raise UserError("oneshot needs a recipe, for instance GPTQModifier(scheme='W4A16', ignore=['lm_head'])")
    spec = CalibrationSpec(
        dataset, dataset_config_name, splits, text_column, num_calibration_samples, max_seq_length,
        shuffle_calibration_samples, concatenate_data, streaming, seed, moe_calibrate_all_experts,
    )  # fmt: skip
    modifiers = parse_recipe(recipe)
    source = open_source(
        model, _tokenizer(tokenizer), keep=True, check=lambda empty: plan_of(empty, modifiers), device=device
    )
    job = CompressionJob(source, modifiers, spec, batch_size)
    job.run(None if output_dir is None else Path(output_dir), resume)
    return source.model


def _tokenizer(tokenizer: Any) -> Any:
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
