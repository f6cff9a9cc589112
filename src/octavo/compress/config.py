"""Settings of `octavo compress`. No torch here: the help must come up at once."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.compress.schemes import PRESETS
from octavo.settings import setting

OBSERVERS = ("minmax", "mse", "imatrix_mse", "signed", "imatrix_signed", "hessian_signed")


@dataclass
class CompressConfig:
    """What to compress, how, and on which text to calibrate. Argument names are LLM Compressor's where it has them."""

    model: str = setting(help="directory, .gguf file, Hugging Face id, or 'demo'", positional=True)
    output_dir: str = setting(help="folder for the checkpoint and compression_report.json", metavar="DIR")
    scheme: str | None = setting(
        None,
        f"quantization scheme: {', '.join(PRESETS)}; W4A16 if neither this nor a recipe is given",
    )
    algorithm: str | None = setting(
        None,
        "rtn rounds, gptq rounds with compensation; scaling of channels before either: awq, awq+gptq, and for "
        "activations smoothquant+gptq; gptq if neither this nor a recipe is given",
        metavar="ALGORITHM",
    )
    recipe: str | None = setting(None, "YAML recipe instead of scheme and algorithm", metavar="FILE")
    dataset: str | None = setting(
        None,
        "calibration data set on the Hub, for instance wikitext; without one, Python's own documentation",
        metavar="NAME",
    )
    dataset_config_name: str | None = setting(None, "configuration of the data set", metavar="NAME")
    splits: str | None = setting(None, "split of the data set, for instance train[:10%]", metavar="SPLIT")
    calibration_file: str | None = setting(None, "text to calibrate on: .txt, .jsonl, .json or .csv", metavar="FILE")
    text_column: str = setting("text", "column of the data set or file that holds the text")
    num_calibration_samples: int = setting(128, "sequences to calibrate on")
    max_seq_length: int | None = setting(
        None,
        "tokens a calibration sequence; if not given, 512 or the model's context if that is shorter",
        metavar="TOKENS",
    )
    shuffle_calibration_samples: bool = setting(False, "draw the sequences at random instead of taking the first ones")
    group_size: int | None = setting(
        None,
        "inputs that share a scale, -1 for a whole row; if not given, the scheme's, 64 or 32 where that does not fit",
    )
    ignore: tuple[str, ...] = setting(
        ("lm_head",), "layers to leave alone: full names, class names, or re: and a regular expression"
    )
    observer: str | None = setting(
        None,
        "how scales are chosen; if not given, imatrix_signed for gptq, hessian_signed for rtn after awq or where "
        "calibration text is given, else signed",
        choices=OBSERVERS,
    )
    dampening_frac: float = setting(0.01, "gptq: added to the Hessian's diagonal, in units of its mean")
    block_size: int = setting(128, "gptq: columns that are rounded before the rest is brought up to date")
    actorder: str = setting("static", "gptq: take columns by importance, or as they are", choices=("static", "none"))
    align: bool = setting(
        True,
        "gptq: layers aim at their outputs in the model as it came, not in the model as compressed so far: better "
        "models, and one more pass over the data",
    )
    moe_calibrate_all_experts: bool = setting(
        True, "calibrate each expert of a mixture on all tokens, not only on those that are sent to it"
    )
    target_size: str | None = setting(
        None,
        "choose bits by layer, by measured sensitivity, for this size: bytes (90MB), a share of the original (40%) or "
        "bits a weight (4.25bits)",
        metavar="SIZE",
    )
    max_perplexity_increase: float | None = setting(
        None,
        "choose bits by layer for the smallest size found whose perplexity, on held-out calibration text, rises by at "
        "most so many percent",
        metavar="PERCENT",
    )
    bit_choices: tuple[int, ...] = setting(
        (3, 4, 5, 6, 8), "widths that these choose from, beside leaving layers as they are"
    )
    batch_size: int | None = setting(
        None, "sequences a forward pass; if not given, all at once where they fit, else some", metavar="N"
    )
    device: str = setting("auto", "where blocks run: 'auto', 'cpu' or 'cuda'", choices=("auto", "cpu", "cuda"))
    seed: int = setting(0, "seed of everything that is drawn at random")
    resume: bool = setting(False, "go on after the blocks that an interrupted run finished")

    def check(self) -> None:
        """Refuse what no model could be compressed with. Raises UserError."""
        from octavo.compress.command import check_mixed_precision, modifiers_of, spec_of

        check_mixed_precision(self)
        spec_of(self)
        modifiers_of(self)
