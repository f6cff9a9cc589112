"""Settings of `octavo quickstart`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.errors import UserError
from octavo.settings import setting


@dataclass
class QuickstartConfig:
    """What to run, and what has to hold for the verdict `deploy`."""

    model: str = setting("demo", "directory, .gguf file, Hugging Face id, or demo", positional=True)
    output_dir: str = setting("octavo-quickstart", "Folder for the checkpoint, the loads and the report", metavar="DIR")
    slo: str = setting(
        "chat", "Objective of the loads: chat, rag, or limits such as ttft_ms=200,itl_ms=50,percentile=99"
    )
    max_perplexity_increase: float = setting(10.0, "Objective of the quality: most percent that perplexity may rise")
    scheme: str = setting("W4A16", "Scheme to compress to", choices=("W4A16", "W8A16", "W8A8"))
    algorithm: str = setting("gptq", "Algorithm to compress with", choices=("gptq", "rtn"))
    num_calibration_samples: int = setting(32, "Windows of the built-in text to calibrate on")
    max_seq_length: int = setting(512, "Tokens of a calibration window")
    perplexity_windows: int = setting(24, "Windows of 512 tokens of held-out text for the perplexity")
    streams: int = setting(4, "Requests at once in the concurrent load")
    load_seconds: float = setting(25.0, "Seconds of each of the two loads")
    prompt_tokens: int = setting(64, "Prompt length of the loads")
    output_tokens: int = setting(24, "Answer length of the loads")

    def __post_init__(self) -> None:
        for name in (
            "num_calibration_samples",
            "max_seq_length",
            "perplexity_windows",
            "streams",
            "prompt_tokens",
            "output_tokens",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)
        if not 0 < self.load_seconds < math.inf:
            raise UserError(f"load_seconds is {self.load_seconds}; it must be above 0", param="load_seconds")
        if not 0 <= self.max_perplexity_increase < math.inf:
            raise UserError(
                f"max_perplexity_increase is {self.max_perplexity_increase}; it must be 0 or more percent",
                param="max_perplexity_increase",
            )
