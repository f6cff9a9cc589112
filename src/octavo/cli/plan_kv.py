"""Memory that the KV cache of a model needs, from its configuration alone.

MODEL is a preset (llama-3-70b, llama-3.1-8b, llama-4-scout, qwen3-0.6b, demo), a config.json, a directory, a .gguf file
or a Hugging Face id, of which only config.json is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cli.common import print_json, print_table, read_config
from octavo.plan.kv import plan_kv
from octavo.settings import setting
from octavo.units import binary_size, size

EXAMPLES = """
  octavo plan kv llama-3-70b
  octavo plan kv Qwen/Qwen3-0.6B --tokens 4k,32k --requests 64 --kv-cache-dtype fp8 --json
"""


@dataclass
class PlanKVSettings:
    """What to calculate."""

    model: str = setting(help="preset, config.json, directory, .gguf file or Hugging Face id", positional=True)
    tokens: list[int] = setting(help="Context lengths", default_factory=lambda: [2000, 8000, 32000, 128000])
    requests: int = setting(10, "Requests at once, for the last column")
    kv_cache_dtype: str = setting(
        "auto",
        "Type of the cached numbers; auto is the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
    )
    json: bool = setting(False, "Print JSON instead of a table")


def settings() -> tuple[type, ...]:
    return (PlanKVSettings,)


def run(s: PlanKVSettings) -> int:
    plan = plan_kv(read_config(s.model), s.tokens, s.requests, s.kv_cache_dtype)
    if s.json:
        print_json({"model": s.model, **plan.to_dict()})
        return 0
    one = plan.bytes_per_token
    rows = [
        (f"{r.tokens:,}", size(r.bytes_per_request), binary_size(r.bytes_per_request), size(r.bytes_total))
        for r in plan.rows
    ]
    formula = (
        f"2 x {plan.layers} layers x {plan.kv_heads} KV heads x {plan.head_dim} head size x {plan.dtype_bytes} bytes"
    )
    if plan.is_latent:
        formula = f"one latent vector in each of {plan.layers} layers, {plan.dtype_bytes} bytes a number"
    notes = [f"a token: {formula} = {one:,} bytes = {binary_size(one)} ({plan.dtype})"]
    if plan.windowed_layers:
        notes.append(
            f"{plan.windowed_layers} of {plan.layers} layers keep a window only: beyond it a token adds "
            f"{binary_size(plan.bytes_per_token_full)}, and the table counts that."
        )
    notes.append(
        "GB is 10^9 bytes and GiB 2^30; figures elsewhere often multiply KiB by rounded tokens and call the result GB."
    )
    columns = ("tokens", "one request", "(binary)", f"{plan.requests:,} requests")
    print_table(f"KV cache of {s.model}", columns, rows, notes)
    return 0
