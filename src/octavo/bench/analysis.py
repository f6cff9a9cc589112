"""From the records of a run to its figures: metrics with intervals, throughput, overload, checks of the counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from octavo.bench import statistics
from octavo.bench.load import Limits, LoadResult
from octavo.bench.profiles import RunPlan
from octavo.bench.records import RequestRecord
from octavo.bench.slo import Slo, judge

METRICS = ("ttft_ms", "itl_ms", "tpot_ms", "request_latency_ms", "queue_delay_ms")
LATE_CLIENT_MS = 20.0
BURST_MS = 0.1  # chunks that lie closer came out of the socket together
QUANTILE_STEPS = [*range(100), 99.5, 99.9, 100]
MAX_TIMELINE_POINTS = 300
NO_SLO: dict[str, Any] = {"attainment": None, "goodput": None, "met": None}


def run_report(
    plan: RunPlan, load: LoadResult, limits: Limits, slo: Slo | None, warmup: float = 0.0, cooldown: float = 0.0
) -> dict[str, Any]:
    """One entry of `runs` in benchmark.json."""
    records, start_ns, end_ns = measured_window(load, limits, warmup, cooldown)
    completed = [r for r in records if r.is_completed]
    duration = max((end_ns - start_ns) / 1e9, 1e-9) if records else 0.0
    figures = _figures(completed)
    output_tokens = sum(r.output_tokens for r in completed)
    report: dict[str, Any] = {
        "profile": plan.profile,
        "rate": plan.rate,
        "streams": plan.streams,
        "duration_s": duration,
        "requests": _count_states(records),
        "requests_left_out": len(load.records) - len(records),
        "metrics": {name: _summary(entry) for name, entry in figures.items()},
        "output_tokens_per_second": output_tokens / duration if duration else 0.0,
        "prompt_tokens_per_second": sum(r.prompt_tokens or 0 for r in completed) / duration if duration else 0.0,
        "requests_per_second": len(completed) / duration if duration else 0.0,
        "slo": judge(slo, records, figures, duration) if slo else dict(NO_SLO),
        "realised_rate": _realised_rate(plan, load),
        "stop_reason": load.stop_reason,
        "errors": dict(Counter(r.error_kind for r in records if r.status == "failed")),
        "error_examples": _error_examples(records),
        "tokens": _token_counts(completed),
        "distributions": {n: _quantiles(figures[n]["ordered"]) for n in ("ttft_ms", "itl_ms", "request_latency_ms")},
        "timeline": _timeline(records, load.start_ns),
    }
    report["overloaded"], report["overload_reason"] = detect_overload(plan, load, records)
    report["warnings"] = _warnings(plan, report, records)
    return report


def measured_window(
    load: LoadResult, limits: Limits, warmup: float, cooldown: float
) -> tuple[list[RequestRecord], int, int]:
    """The records that count, and the window (ns) that they span.

    A request counts when it was scheduled behind the warm-up and before the cool-down. Both are shares when below 1,
    else requests when the run is limited by requests, else seconds.
    """
    records = load.records
    if not records:
        return [], load.start_ns, load.end_ns
    if limits.max_requests is not None:
        skip, drop = (_amount(value, len(records)) for value in (warmup, cooldown))
        records = records[math.ceil(skip) : len(records) - math.floor(drop)]
    else:
        length = (load.arrivals_end_ns - load.start_ns) / 1e9
        first = load.start_ns + _amount(warmup, length) * 1e9
        last = load.arrivals_end_ns - _amount(cooldown, length) * 1e9
        records = [r for r in records if first <= r.scheduled_ns and (cooldown == 0 or r.scheduled_ns <= last)]
    if not records:
        return [], load.start_ns, load.end_ns
    return records, records[0].scheduled_ns, max(r.end_ns for r in records)


def detect_overload(plan: RunPlan, load: LoadResult, records: Sequence[RequestRecord]) -> tuple[bool | None, str]:
    """Whether requests came faster than they were served, so that the figures depend on how long the load lasted.

    Only an open loop can be overloaded (None otherwise). Two signs must agree: latency rises over the run (the slope of
    latency against scheduled time is above zero with 95 % confidence, and the last third waits at least 1.5 times as
    long as the first), and fewer requests ended than came while they were coming (under 95 % in the last two thirds of
    the arrivals).
    """
    if not plan.is_open_loop:
        return None, "a closed loop sends no faster than it is served"
    ended = [r for r in records if r.is_completed or (r.status == "cancelled" and r.end_ns)]
    if len(ended) < 12:
        return False, f"{len(ended)} requests are too few to see a trend"
    times = [(r.scheduled_ns - load.start_ns) / 1e9 for r in ended]
    slope = statistics.slope_interval(times, [r.latency_ms for r in ended])
    third = len(ended) // 3
    early, late = (
        statistics.percentile(sorted(r.latency_ms for r in part), 50) for part in (ended[:third], ended[-third:])
    )
    begin = load.start_ns + (load.arrivals_end_ns - load.start_ns) // 3
    came = sum(begin <= r.scheduled_ns <= load.arrivals_end_ns for r in load.records)
    served = sum(begin <= r.end_ns <= load.arrivals_end_ns and r.is_completed for r in load.records)
    rises = slope is not None and slope[0] > 0 and late > 1.5 * early
    if rises and served < 0.95 * came:
        return True, (
            f"median latency rose from {early:.0f} to {late:.0f} ms, and while {came} requests came only {served} ended"
        )
    if rises:
        return False, "latency grows, but requests end as fast as they come"
    return False, "latency does not grow over the run"


def _figures(completed: Sequence[RequestRecord]) -> dict[str, Any]:
    """Values of each metric in request order, sorted values, and for gaps how many belong to each request."""
    gaps = [r.gaps_ms() for r in completed]
    values: dict[str, list[float]] = {
        "ttft_ms": [r.ttft_ms for r in completed if r.ttft_ms is not None],
        "itl_ms": [gap for request in gaps for gap in request],
        "tpot_ms": [r.tpot_ms for r in completed if r.tpot_ms is not None],
        "request_latency_ms": [r.latency_ms for r in completed],
        "queue_delay_ms": [r.queue_delay_ms for r in completed if r.queue_delay_ms is not None],
    }
    figures = {name: {"values": v, "ordered": sorted(v), "clusters": None} for name, v in values.items()}
    figures["itl_ms"]["clusters"] = [len(request) for request in gaps]
    return figures


def _summary(entry: dict[str, Any]) -> dict[str, Any]:
    return statistics.summarize(entry["values"], entry["clusters"])


def _count_states(records: Sequence[RequestRecord]) -> dict[str, int]:
    counts = Counter(r.status for r in records)
    return {state: counts.get(state, 0) for state in ("completed", "failed", "cancelled")}


def _realised_rate(plan: RunPlan, load: LoadResult) -> float | None:
    """Requests a second that an open loop really scheduled; 30 Poisson arrivals rarely come at the nominal rate."""
    seconds = (load.arrivals_end_ns - load.start_ns) / 1e9
    if not plan.is_open_loop or seconds <= 0:
        return None
    return len(load.records) / seconds


def _error_examples(records: Sequence[RequestRecord]) -> dict[str, str]:
    examples: dict[str, str] = {}
    for record in records:
        if record.status == "failed" and record.error_kind:
            examples.setdefault(record.error_kind, (record.error or "")[:300])
    return examples


def _token_counts(completed: Sequence[RequestRecord]) -> dict[str, Any]:
    """What was asked for beside what the server counted."""
    prompts = [r.prompt_tokens for r in completed if r.prompt_tokens is not None]
    asked = [r.requested_prompt for r in completed if r.requested_prompt is not None]
    chunks = sum(len(r.token_ns) for r in completed)
    bursts = sum(gap < BURST_MS for r in completed for gap in r.gaps_ms())
    output = sum(r.output_tokens for r in completed)
    cached = [r.cached_tokens for r in completed if r.cached_tokens is not None]
    return {
        "prompt_requested_mean": sum(asked) / len(asked) if asked else None,
        "prompt_mean": sum(prompts) / len(prompts) if prompts else None,
        "output_mean": output / len(completed) if completed else None,
        "output_total": output,
        "output_mismatches": sum(
            r.requested_output is not None and r.has_usage and r.output_tokens != r.requested_output for r in completed
        ),
        "without_usage": sum(not r.has_usage for r in completed),
        "tokens_per_chunk": output / chunks if chunks else None,
        "burst_share": bursts / (chunks - len(completed)) if chunks > len(completed) else None,
        "cached_share": sum(cached) / sum(prompts) if cached and sum(prompts) else None,
        "repeated_prompts": sum(r.is_repeated_prompt for r in completed),
    }


def _warnings(plan: RunPlan, report: dict[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    tokens, counts = report["tokens"], report["requests"]
    warnings: list[str] = []
    if counts["failed"]:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in report["errors"].items())
        warnings.append(f"{counts['failed']} requests failed ({kinds}); latencies are those of completed ones alone")
    if report["stop_reason"] == "failures":
        warnings.append("the run was given up because requests kept failing")
    if tokens["output_mismatches"]:
        warnings.append(
            f"{tokens['output_mismatches']} answers had another number of tokens than was asked for (mean "
            f"{tokens['output_mean']:.1f}): the server ended them early or ignores ignore_eos"
        )
    if tokens["without_usage"]:
        warnings.append(f"{tokens['without_usage']} answers came without usage; their tokens are counted as chunks")
    if tokens["tokens_per_chunk"] and tokens["tokens_per_chunk"] > 1.05:
        warnings.append(
            f"a chunk brings {tokens['tokens_per_chunk']:.2f} tokens on average: itl_ms are gaps between chunks, "
            "tpot_ms is the time a token"
        )
    if tokens["burst_share"] and tokens["burst_share"] > 0.2:
        warnings.append(
            f"{100 * tokens['burst_share']:.0f} % of chunks came together with the one before: the server or network "
            "sends in bursts, so look at tpot_ms and at the tail of itl_ms, not at its median"
        )
    if tokens["repeated_prompts"]:
        warnings.append(f"{tokens['repeated_prompts']} requests repeated a prompt, which a prefix cache makes faster")
    p99 = report["metrics"]["queue_delay_ms"]["p99"]
    if plan.is_open_loop and p99 is not None and p99 > LATE_CLIENT_MS:
        warnings.append(
            f"requests left up to {p99:.0f} ms (p99) late: --max-concurrency held them, or this machine is too busy to "
            "make the load"
        )
    if report["overloaded"]:
        warnings.append(f"overloaded: {report['overload_reason']}. Its latencies depend on how long the load lasts")
    if records and not counts["completed"]:
        warnings.append("no request completed")
    return warnings


def _quantiles(ordered: Sequence[float]) -> dict[str, list[float]] | None:
    """Points of the cumulative distribution: percentages and the values below which they lie."""
    if not ordered:
        return None
    return {"percent": QUANTILE_STEPS, "value": [round(statistics.percentile(ordered, q), 4) for q in QUANTILE_STEPS]}


def _timeline(records: Sequence[RequestRecord], start_ns: int) -> list[list[Any]]:
    """[scheduled s, ttft ms, latency ms, status] of at most a few hundred requests, evenly taken."""
    step = max(1, math.ceil(len(records) / MAX_TIMELINE_POINTS))
    return [
        [
            round((r.scheduled_ns - start_ns) / 1e9, 4),
            None if r.ttft_ms is None else round(r.ttft_ms, 3),
            round(r.latency_ms, 3),
            r.status,
        ]
        for r in records[::step]
    ]


def _amount(value: float, whole: float) -> float:
    return value * whole if value < 1 else min(value, whole)
