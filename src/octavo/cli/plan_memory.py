"""Memory that the weights of a model need at each width, and how many accelerators hold them.

MODEL is a preset (llama-3-70b, llama-3.1-8b, llama-4-scout, qwen3-0.6b, demo), a config.json, a directory, a .gguf file
or a Hugging Face id, of which only config.json is fetched. --params gives the number of parameters instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cli.common import print_json, print_table, read_config
from octavo.plan.hardware import find_accelerator
from octavo.plan.memory import MemoryPlan, parse_count, plan_memory
from octavo.plan.shape import parameters
from octavo.settings import setting
from octavo.settings_parser import UsageError
from octavo.units import size

EXAMPLES = """
  octavo plan memory llama-4-scout
  octavo plan memory --params 109B --bits 16,8,4 --gpu-memory 80
  octavo plan memory Qwen/Qwen3-0.6B --accelerator l40s
"""


@dataclass
class PlanMemorySettings:
    """What to calculate."""

    model: str | None = setting(None, "preset, config.json, directory, .gguf file or Hugging Face id", positional=True)
    params: str | None = setting(None, "Number of parameters, such as 109B, instead of MODEL", metavar="COUNT")
    bits: list[int] = setting(help="Widths of the weights", default_factory=lambda: [16, 8, 4])
    gpu_memory: float = setting(80.0, "Memory of one accelerator in GB (10^9 bytes)")
    accelerator: str | None = setting(None, "Take the memory of this one instead, such as a100-80, h200, l40s, mi300x")
    group_size: int = setting(128, "Weights that share one 16-bit scale in a quantized checkpoint")
    json: bool = setting(False, "Print JSON instead of a table")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.params is None):
            raise UsageError("give MODEL or --params COUNT, one of the two")


def settings() -> tuple[type, ...]:
    return (PlanMemorySettings,)


def run(s: PlanMemorySettings) -> int:
    known = parse_count(s.params) if s.params else parameters(read_config(str(s.model)))
    memory = find_accelerator(s.accelerator).memory_bytes if s.accelerator else round(s.gpu_memory * 1e9)
    plan = plan_memory(known, s.bits, memory, s.group_size)
    if s.json:
        print_json({"model": s.model or s.params, **plan.to_dict()})
        return 0
    _print(plan, s.model or f"a model of {s.params} parameters")
    return 0


def _print(plan: MemoryPlan, name: str) -> None:
    each = size(plan.device_memory_bytes)
    columns = ["bits", "all weights", "saved", f"devices of {each}", "free beside them"]
    rows = [
        [str(r.bits), size(r.weight_bytes), f"{r.reduction:.0%}", str(r.devices), size(r.free_bytes)] for r in plan.rows
    ]
    notes = [f"{plan.params:,} parameters" + (f", {plan.active_params:,} active a token" if plan.active_params else "")]
    if plan.linear_share is not None:
        columns += ["linear layers quantized", "saved", "devices"]
        for row, r in zip(rows, plan.rows, strict=True):
            real = r.checkpoint_bytes if r.checkpoint_bytes is not None else r.weight_bytes
            row += [size(real), f"{r.checkpoint_reduction or 0:.0%}", str(r.checkpoint_devices or r.devices)]
        notes.append(
            f"Quantization covers the linear layers: {plan.linear_share:.1%} of the parameters. Embeddings, LM head "
            f"and norms stay at 16 bits, and each {plan.group_size} weights share a 16-bit scale: that is what a "
            "checkpoint on disk saves."
        )
    notes += _tied_note(plan)
    notes.append("The devices hold the weights alone; the KV cache (octavo plan kv) and the activations come on top.")
    print_table(f"Weights of {name}", columns, rows, notes)


def _tied_note(plan: MemoryPlan) -> list[str]:
    extra = plan.duplicate_head_bytes
    last = plan.rows[-1]
    if not extra or last.checkpoint_bytes is None:
        return []
    before, after = 2 * plan.params + extra, last.checkpoint_bytes + extra
    return [
        f"The LM head is tied to the embedding. A file that stores it twice ({size(extra)} more) goes from "
        f"{size(before)} to {size(after)} at {last.bits} bits: only {1 - after / before:.0%} less."
    ]
