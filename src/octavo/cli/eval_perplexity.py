"""Perplexity of a model on a text, with a confidence interval. Lower is better; compare on the same text only.

`windows` cuts the text into separate windows of the model's context (the 2,048-token protocol of the quantization
papers); `sliding` moves a window with overlap, so that each token is predicted from a long context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.evaluate.config import PerplexityConfig

EXAMPLES = """
  octavo eval perplexity demo --dataset wikitext
  octavo eval perplexity ./model-w4a16 --file held-out.txt --protocol sliding --json result.json
"""


def settings() -> tuple[type, ...]:
    from octavo.evaluate.config import PerplexityConfig

    return (PerplexityConfig,)


def run(config: PerplexityConfig) -> int:
    from octavo.evaluate.perplexity import run as perplexity

    perplexity(config)
    return 0
