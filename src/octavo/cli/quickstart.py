"""Run the whole loop on the demo model: compress, serve, load, evaluate, decide.

Takes some minutes on two cores. Everything it prints is measured in this run, and report.html and report.json hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.decide.config import QuickstartConfig

EXAMPLES = """
  octavo quickstart
  octavo quickstart --slo "ttft_ms=200,itl_ms=50,percentile=99" --streams 8 --output-dir run1
"""


def settings() -> tuple[type, ...]:
    from octavo.decide.config import QuickstartConfig

    return (QuickstartConfig,)


def run(config: QuickstartConfig) -> int:
    from octavo.decide.quickstart import quickstart

    quickstart(config)
    return 0
