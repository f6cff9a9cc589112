"""Perplexity of a model on a text, computed by Octavo's own engine.

Two protocols. "windows" (GPTQ, Frantar et al. 2022, and those after it): the text is tokenized once and cut into
windows that do not overlap; the tail is dropped; in each window every token but the first is predicted. "sliding"
(transformers' documentation on perplexity of fixed-length models): windows overlap and only tokens that no earlier
window predicted count, so nearly every token has a long context. Figures of different protocols or tokenizers cannot be
compared.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import UserError
from octavo.evaluate.config import PerplexityConfig
from octavo.evaluate.texts import load_text
from octavo.progress import Progress

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Window:
    """Tokens start..end of the text, of which the last `num_scored` are predicted and counted."""

    start: int
    end: int
    num_scored: int


@dataclass(frozen=True)
class PerplexityResult:
    """exp of the mean negative log-likelihood; `ci95` by resampling windows (None for a single one)."""

    perplexity: float
    ci95: tuple[float, float] | None
    tokens: int
    windows: int
    mean_nll: float
    protocol: str
    window: int
    stride: int | None
    seconds: float


def cut(num_tokens: int, protocol: str, window: int, stride: int, max_windows: int | None = None) -> list[Window]:
    """The windows of a text of `num_tokens`. Raises UserError for a text shorter than one window of "windows"."""
    windows: list[Window] = []
    if protocol == "windows":
        if num_tokens < window:
            raise UserError(
                f"the text has {num_tokens} tokens, less than one window of {window}; give a longer text, a smaller "
                "--window, or --protocol sliding"
            )
        windows = [Window(i * window, (i + 1) * window, window - 1) for i in range(num_tokens // window)]
    else:
        if num_tokens < 2:
            raise UserError(f"the text has {num_tokens} tokens; a prediction needs at least 2")
        scored_to = 1  # nothing predicts the first token
        for start in range(0, num_tokens, stride):
            end = min(start + window, num_tokens)
            windows.append(Window(start, end, end - scored_to))
            scored_to = end
            if end == num_tokens:
                break
    return windows[:max_windows]


def measure(
    llm: LLM,
    token_ids: Sequence[int],
    *,
    protocol: str = "windows",
    window: int = 2048,
    stride: int = 512,
    max_windows: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PerplexityResult:
    """Perplexity of a loaded model on a tokenized text. `on_progress` gets the windows done and all windows."""
    began = time.perf_counter()
    windows = cut(len(token_ids), protocol, window, stride, max_windows)
    sums: list[float] = []
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        sums += _negative_log_likelihoods(llm, token_ids, batch)
        on_progress(len(sums), len(windows))
    counts = [w.num_scored for w in windows]
    mean = math.fsum(sums) / sum(counts)
    return PerplexityResult(
        perplexity=_exp(mean),
        ci95=_interval(sums, counts, seed),
        tokens=sum(counts),
        windows=len(windows),
        mean_nll=mean,
        protocol=protocol,
        window=window,
        stride=stride if protocol == "sliding" else None,
        seconds=time.perf_counter() - began,
    )


def run(config: PerplexityConfig, *, quiet: bool = False) -> PerplexityResult:
    """`octavo eval perplexity`: load text and model, measure, print, write the JSON file. Raises UserError."""
    config.check()
    text, description = load_text(config)

    from octavo.engine.llm import LLM

    with (
        LLM(
            config.model,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            model_impl=config.model_impl,
            max_model_len=config.window,
            enable_prefix_caching=False,  # a prefix hit would skip the very predictions that count
        ) as llm,
        Progress(None, "windows", enabled=not quiet) as progress,
    ):
        # verbose=False: the whole text is meant to be longer than the context
        token_ids = llm.get_tokenizer().encode(text, verbose=False)
        result = measure(
            llm, token_ids, protocol=config.protocol, window=config.window, stride=config.stride,
            max_windows=config.max_windows, batch_size=config.batch_size, seed=config.seed, on_progress=progress.update,
        )  # fmt: skip
    if not quiet:
        print(describe(result, description))
    if config.json is not None:
        write_json(result, config, description)
    return result


def describe(result: PerplexityResult, text: str) -> str:
    """Two lines for people."""
    interval = "" if result.ci95 is None else f" (95 %: {result.ci95[0]:.3f} to {result.ci95[1]:.3f})"
    how = f"{result.windows} windows of {result.window}" + (f", stride {result.stride}" if result.stride else "")
    return (
        f"perplexity {result.perplexity:.4f}{interval}\n"
        f"{text}; {result.protocol} protocol, {how}; {result.tokens:,} tokens predicted in {result.seconds:.1f} s"
    )


def write_json(result: PerplexityResult, config: PerplexityConfig, text: str) -> None:
    """The result and what it depends on. Raises UserError when the file cannot be written."""
    content: dict[str, Any] = asdict(result) | {
        "model": config.model,
        "text": text,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "model_impl": config.model_impl,
    }
    path = Path(str(config.json))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}", param="json") from None


def _negative_log_likelihoods(llm: LLM, token_ids: Sequence[int], windows: Sequence[Window]) -> list[float]:
    """The sum over each window's scored tokens, in double precision.

    The prompt is the window without its last token, which is then the one token that may be generated. So the context
    need not be longer than the window, and models whose context is exactly the window can be measured.
    """
    from octavo.core.sampling_params import SamplingParams

    prompts = [{"prompt_token_ids": list(token_ids[w.start : w.end - 1])} for w in windows]
    params = [
        SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False,
            allowed_token_ids=[token_ids[w.end - 1]],
        )
        for w in windows
    ]  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    sums: list[float] = []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        last = token_ids[window.end - 1]
        scores = [output.outputs[0].logprobs[0][last].logprob]
        first_scored = window.end - window.num_scored
        for position in range(first_scored, window.end - 1):
            entry = output.prompt_logprobs[position - window.start]
            assert entry is not None, "only the first token of a window has no prediction"
            scores.append(entry[token_ids[position]].logprob)
        sums.append(-math.fsum(scores))
    return sums


def _interval(sums: Sequence[float], counts: Sequence[int], seed: int) -> tuple[float, float] | None:
    """95 % percentile bootstrap over windows, since tokens of one window depend on each other."""
    n = len(sums)
    if n < 2:
        return None
    rng = random.Random(seed)
    means: list[float] = []
    for _ in range(NUM_RESAMPLES):
        chosen = rng.choices(range(n), k=n)
        means.append(math.fsum(sums[i] for i in chosen) / sum(counts[i] for i in chosen))
    means.sort()
    return _exp(means[int(0.025 * NUM_RESAMPLES)]), _exp(means[int(0.975 * NUM_RESAMPLES) - 1])


def _exp(value: float) -> float:
    """exp that ends in infinity, as the perplexity of a model that rules a token out is."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
