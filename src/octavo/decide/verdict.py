"""The decision: each objective against what was measured, and deploy only when all of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One objective. `note` says how sure the measurement is, or what else a reader needs."""

    name: str
    objective: str
    measured: str
    is_met: bool
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """All checks, and what follows from them."""

    checks: tuple[Check, ...]
    advice: tuple[str, ...] = field(default=())

    @property
    def is_deploy(self) -> bool:
        return all(check.is_met for check in self.checks)

    @property
    def headline(self) -> str:
        if self.is_deploy:
            return "Deploy: every objective holds."
        missed = [check.name for check in self.checks if not check.is_met]
        return f"Do not deploy: {' and '.join(missed)} missed."


def check_size(before: int, after: int) -> Check:
    """The checkpoint must have become smaller."""
    saved = 1 - after / before
    return Check("size", "smaller than the original", f"{saved:.1%} smaller", after < before)


def check_perplexity(before: float, after: float, limit_percent: float, interval: tuple[float, float] | None) -> Check:
    """Perplexity may rise by at most `limit_percent`; `interval` is the rise's 95 % interval in percent."""
    rise = 100 * (after / before - 1)
    note = ""
    if interval is not None:
        low, high = interval
        side = "within" if high <= limit_percent else "beyond" if low > limit_percent else "on both sides of"
        note = f"95 % interval of the rise {low:+.1f} % to {high:+.1f} %: {side} the limit"
    return Check(
        "quality", f"perplexity at most {limit_percent:g} % higher", f"{rise:+.1f} %", rise <= limit_percent, note
    )


def check_load(title: str, objective: str, slo: dict[str, object], requests: int) -> Check:
    """A load's own verdict, as `octavo bench` judged it."""
    attainment = slo["attainment"]
    assert isinstance(attainment, float)
    note = "" if slo.get("decided", True) else f"{requests} requests are too few to be sure of the percentile"
    return Check(title, objective, f"{attainment:.1%} of {requests} requests", bool(slo["met"]), note)


def advise(checks: Sequence[Check], scheme: str) -> tuple[str, ...]:
    """What to try for each objective that was missed."""
    hints = {
        "quality": f"a wider scheme than {scheme}, such as W8A16, or more calibration samples",
        "size": "a narrower scheme, such as W4A16",
    }
    missed = [check.name for check in checks if not check.is_met]
    lines = [f"{name}: try {hints[name]}." for name in missed if name in hints]
    loads = [name for name in missed if name not in hints]
    if loads:
        where = "`octavo bench --profile sweep` finds the rate that holds"
        lines.append(f"{' and '.join(loads)}: try shorter prompts, fewer streams or a faster machine; {where}.")
    return tuple(lines)
