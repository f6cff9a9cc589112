"""Load an OpenAI-compatible server and judge it against an objective that is stated first.

Writes benchmark.json, benchmark.csv and a self-contained benchmark.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.bench.config import BenchConfig

EXAMPLES = """
  octavo bench --target http://127.0.0.1:8000 --profile synchronous --max-requests 10 \\
      --data "prompt_tokens=32,output_tokens=16,samples=32" --output-dir out
  octavo bench --target http://127.0.0.1:8000 --profile poisson --rate 1,2,4 --slo chat --output-dir out
"""


def settings() -> tuple[type, ...]:
    from octavo.bench.config import BenchConfig

    return (BenchConfig,)


def run(config: BenchConfig) -> int:
    from octavo.bench.run import run as bench

    return bench(config).exit_code
