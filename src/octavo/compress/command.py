"""`octavo compress`: a compression as the settings describe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from octavo.compress.algorithms import STEPS, algorithm_chain
from octavo.compress.bit_allocation import parse_target
from octavo.compress.calibration import CalibrationSpec
from octavo.compress.config import CompressConfig
from octavo.compress.job import CompressionJob, CompressionResult, plan_of
from octavo.compress.mixed import MixedPrecision, for_perplexity, for_size
from octavo.compress.model_source import ModelSource
from octavo.compress.modifiers.base import Modifier
from octavo.compress.open_source import open_source
from octavo.compress.recipe import parse_recipe
from octavo.compress.report import report_lines
from octavo.errors import UserError

_GPTQ_SETTINGS = ("dampening_frac", "block_size", "actorder", "align")


def run(config: CompressConfig, quiet: bool = False) -> CompressionResult:
    """Compress as the settings say and print the report, unless `quiet`. UserError says what is wrong with them."""
    spec, modifiers = spec_of(config), modifiers_of(config)
    say = (lambda line: None) if quiet else _say

    def opened() -> ModelSource:
        return open_source(config.model, check=lambda empty: plan_of(empty, modifiers), device=config.device)

    output_dir = Path(config.output_dir)
    if config.target_size is None and config.max_perplexity_increase is None:
        result = CompressionJob(opened(), modifiers, spec, config.batch_size).run(output_dir, config.resume, say)
    else:
        mixed = MixedPrecision(opened, modifiers, spec, config.bit_choices, config.batch_size)
        result = mixed_precision(mixed, config, output_dir, say)
    if not quiet:
        print("\n".join(report_lines(result.report)))
        print(f"written to {config.output_dir}")
    return result


def mixed_precision(
    mixed: MixedPrecision, config: CompressConfig, output_dir: Path, say: Callable[[str], object]
) -> CompressionResult:
    """Bits by layer, for a size or for a limit on perplexity."""
    if config.max_perplexity_increase is not None:
        return for_perplexity(mixed, config.max_perplexity_increase, output_dir, config.resume, say)
    return for_size(mixed, parse_target(config.target_size or ""), output_dir, config.resume, say)


def check_mixed_precision(config: CompressConfig) -> None:
    """UserError for settings of it that no model could be compressed with."""
    percent = config.max_perplexity_increase
    if percent is not None and config.target_size is not None:
        raise UserError("give --target-size or --max-perplexity-increase, not both", param="target_size")
    if percent is not None and not 0 < percent <= 1000:
        raise UserError(f"max_perplexity_increase is {percent}; it must be above 0 percent and at most 1000")
    if config.target_size is not None:
        parse_target(config.target_size)
    if not config.bit_choices or not all(2 <= bits <= 8 for bits in config.bit_choices):
        raise UserError(f"bit_choices is {list(config.bit_choices)}; they must be whole numbers from 2 to 8")


def _say(line: str) -> None:
    print(line, flush=True)


def spec_of(config: CompressConfig) -> CalibrationSpec:
    """The calibration data that the settings mean."""
    if config.dataset is not None and config.calibration_file is not None:
        raise UserError("give --dataset or --calibration-file, not both", param="dataset")
    dataset: Any = config.dataset if config.calibration_file is None else Path(config.calibration_file)
    return CalibrationSpec(
        dataset, config.dataset_config_name, config.splits, config.text_column, config.num_calibration_samples,
        config.max_seq_length, config.shuffle_calibration_samples, seed=config.seed,
        moe_calibrate_all_experts=config.moe_calibrate_all_experts,
    )  # fmt: skip


def modifiers_of(config: CompressConfig) -> list[Modifier]:
    """The recipe that the settings mean: the file's, or the chain that `algorithm` names, with `scheme`."""
    if config.recipe is not None:
        if config.scheme is not None or config.algorithm is not None:
            raise UserError("give --recipe or --scheme and --algorithm, not both", param="recipe")
        _refuse_changed(config, ("group_size", "observer", "ignore", *_GPTQ_SETTINGS), "a recipe, which says it itself")
        return parse_recipe(Path(config.recipe))
    names = algorithm_chain(config.algorithm or "gptq")
    common: dict[str, Any] = {"scheme": config.scheme or "W4A16", "ignore": list(config.ignore)}
    # Where inputs are known (AWQ looks at them anyway), nothing is worth more to rounding than scales chosen by them.
    calibrated = "awq" in names or config.dataset is not None or config.calibration_file is not None
    best = "imatrix_signed" if "gptq" in names else "hessian_signed"
    observer = config.observer or (best if calibrated else None)
    common |= {"group_size": config.group_size, "weight_observer": observer}
    if "gptq" in names:
        order = None if config.actorder == "none" else config.actorder
        common |= {"block_size": config.block_size, "dampening_frac": config.dampening_frac, "actorder": order}
        common |= {"align": config.align}
    else:
        _refuse_changed(config, _GPTQ_SETTINGS, f"algorithm {config.algorithm}, which has no such setting")
    return [STEPS[name](common) for name in names]


def _refuse_changed(config: CompressConfig, names: tuple[str, ...], beside: str) -> None:
    """A setting that would have no effect is refused when it was given."""
    for field in fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            flag = "--" + field.name.replace("_", "-")
            raise UserError(f"{flag} does not go with {beside}; leave it out", param=field.name)
