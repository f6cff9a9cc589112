"""A small result in the form of report.json, for tests that render it. Its figures are made up."""

from __future__ import annotations

import copy
from typing import Any

import pytest

_METRIC = {"p50": 10.0, "p99": 20.0, "mean": 11.0}


def _load(title: str, met: bool, factor: float) -> dict[str, Any]:
    percent = [0.0, 50.0, 99.0, 100.0]
    values = [5.0 * factor, 10.0 * factor, 20.0 * factor, 30.0 * factor]
    quantiles = {"percent": percent, "value": values}
    return {
        "title": title,
        "requests": {"completed": 40, "failed": 0, "cancelled": 0},
        "metrics": dict.fromkeys(("ttft_ms", "itl_ms", "request_latency_ms"), _METRIC),
        "distributions": dict.fromkeys(("ttft_ms", "itl_ms", "request_latency_ms"), quantiles),
        "output_tokens_per_second": 87.6,
        "slo": {"attainment": 1.0 if met else 0.5, "met": met, "requests_judged": 40, "decided": False},
        "warnings": ["a warning of the load"],
    }


def _round(name: str, hits: float) -> dict[str, Any]:
    before = {"prefix_cache_queries_total": 100.0, "prefix_cache_hits_total": 16.0, "prompt_tokens_total": 100.0}
    after = {
        "prefix_cache_queries_total": 2100.0,
        "prefix_cache_hits_total": 16.0 + hits,
        "prompt_tokens_total": 2100.0,
    }
    samples = [
        {
            "seconds": 0.05 * i,
            "values": {"num_requests_running": float(min(i, 5)), "prefix_cache_hits_total": 16 + hits * i / 9},
        }
        for i in range(10)
    ]
    return {
        "name": name,
        "seconds": 1.5,
        "before": before,
        "after": after,
        "samples": samples,
        "answers": [],
        "hit_rate": hits / 2000,
        "peak_running": 5,
        "mean_first_token_s": 0.4,
    }


_RESULT: dict[str, Any] = {
    "octavo": "0.1.0",
    "date": "2026-01-02T03:04+00:00",
    "machine": {"cpu_count": 2, "cpu": "a <fast> CPU", "platform": "test"},
    "model": "demo",
    "scheme": "W4A16",
    "algorithm": "gptq",
    "slo": {
        "text": "chat: time to first token <= 200 ms",
        "limits": {"ttft_ms": 200.0, "itl_ms": 50.0},
        "percentile": 99.0,
    },
    "size": {
        "before": {
            "bytes": 269_000_000,
            "parts": {"embeddings": 56_600_000, "linear layers": 212_300_000, "norms": 100_000},
        },
        "after": {
            "bytes": 113_000_000,
            "parts": {"embeddings": 56_600_000, "linear layers": 53_100_000, "scales": 3_200_000, "norms": 100_000},
        },
        "explanation": ["58 % less rather than 75 %.", "  15.8 points: the embeddings stay"],
        "saved_percent": 58.0,
        "note": "a note on the original",
    },
    "compression": {
        "seconds": 55.5,
        "calibration": {"source": "built-in text", "sequences": 32, "tokens": 16384},
        "mean_error": 0.0123,
        "worst_layer": {"name": "model.layers.0.mlp.down_proj", "error": 0.0456},
        "notes": ["a note of the compression"],
    },
    "perplexity": {
        "before": {"perplexity": 20.0, "ci95": [18.5, 21.6], "tokens": 12288, "windows": 24},
        "after": {"perplexity": 21.0, "ci95": [19.4, 22.7], "tokens": 12288, "windows": 24},
        "rise_percent": 5.0,
        "rise_ci95": [4.0, 6.0],
    },
    "prefix": [_round("different system prompts", 0.0), _round("the same system prompt", 1600.0)],
    "loads": [_load("synchronous", True, 1.0), _load("concurrent, 4 streams", True, 4.0)],
    "kv": {
        "running": 4,
        "blocks": 24,
        "block_size": 16,
        "bytes_per_token": 23040,
        "max_model_len": 8192,
        "load": "concurrent, 4 streams",
        "paged_bytes": 24 * 16 * 23040,
        "contiguous_bytes": 4 * 8192 * 23040,
        "ratio": 4 * 8192 / (24 * 16),
    },
    "verdict": {
        "is_deploy": True,
        "headline": "Deploy: every objective holds.",
        "checks": [
            {"name": "size", "objective": "smaller", "measured": "58 % smaller", "is_met": True, "note": ""},
            {"name": "quality", "objective": "at most 10 %", "measured": "+5 %", "is_met": True, "note": "a <note>"},
        ],
        "advice": [],
    },
    "next_command": "octavo serve out/model",
    "commands": ["octavo compress demo --output-dir out/model"],
    "stages": [{"name": "compress", "seconds": 55.5}],
    "seconds": 200.0,
}


@pytest.fixture
def recorded_result() -> dict[str, Any]:
    """A fresh copy."""
    return copy.deepcopy(_RESULT)
