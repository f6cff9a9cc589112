"""Settings of `octavo eval perplexity`."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import UserError
from octavo.settings import setting

PROTOCOLS = ("windows", "sliding")


@dataclass
class PerplexityConfig:
    """Which model, on which text, cut how."""

    model: str = setting(help="Directory, .gguf file, Hub id or demo.", positional=True)
    dataset: str | None = setting(
        None,
        "wikitext (WikiText-2 raw, from the Hub), builtin (held-out part of Python's own documentation, no download), "
        "or a Hub data set with a text column.",
    )
    file: str | None = setting(None, "Text file (UTF-8) to measure on, instead of --dataset.")
    dataset_config: str | None = setting(None, "Configuration of a Hub data set.")
    dataset_split: str = setting("test", "Split of a Hub data set.")
    protocol: str = setting(
        "windows",
        "windows: separate windows, the protocol of the quantization papers; sliding: overlapping windows of which "
        "only the new tokens count.",
        choices=PROTOCOLS,
    )
    window: int = setting(2048, "Tokens of a window.")
    stride: int = setting(512, "New tokens of each further sliding window.")
    max_windows: int | None = setting(None, "Stop after so many windows.")
    json: str | None = setting(None, "File to write the result to.")
    dtype: str = setting("auto", "Computation type: auto, float32, bfloat16 or float16.")
    device: str = setting("auto", "Device: auto, cpu or cuda.")
    quantization: str | None = setting(None, "Quantize a plain checkpoint on load: int8 or w4a16.")
    model_impl: str = setting("auto", "Model code: native, transformers or auto.")
    batch_size: int = setting(4, "Windows that are computed together.")
    seed: int = setting(0, "Seed of the confidence interval's resampling.")

    def check(self) -> None:
        """Refuse values that make no measurement. Raises UserError."""
        if (self.dataset is None) == (self.file is None):
            raise UserError("give one text: --dataset (wikitext, builtin, or a Hub id) or --file", param="dataset")
        if self.protocol not in PROTOCOLS:
            raise UserError(f"--protocol is {self.protocol!r}; choose {' or '.join(PROTOCOLS)}", param="protocol")
        if self.window < 2:
            raise UserError(f"--window is {self.window}; it must be at least 2 tokens", param="window")
        if self.protocol == "sliding" and not 1 <= self.stride < self.window:
            raise UserError(f"--stride is {self.stride}; it must be in 1..{self.window - 1}", param="stride")
        for name in ("max_windows", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1", param=name)
