"""From a loaded model to a runner: what a step takes of the device's memory, then the KV cache and the CUDA graphs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.engine.config import EngineConfig
from octavo.engine.device_runner import DeviceRunner
from octavo.engine.device_state import DeviceState
from octavo.engine.loading import LoadedModel
from octavo.engine.memory import StepLimits
from octavo.engine.runner import HostRunner, Runner, bind_cache
from octavo.errors import CapacityError
from octavo.layers.step import StepInputs

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = (1, 9, 16, 24, 32, 40, 64, 100, 128, 200, 256, 500, 512, 1000, 1024, 2048)  # kernels differ by these
_EQUAL_PROMPTS = [2048] * 4  # and by these


class Phases:
    """Measures the phases of a start; `seconds` by name, in their order. One inside of another is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]  # seconds of phases inside of each that has begun

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, begin = self.seconds.setdefault(name, 0.0), time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.seconds[name] = before + seconds - self._inside.pop()
            self._inside[-1] += seconds

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No garbage is collected inside, unless by `gc.collect`, which does not look at what is there at the beginning.

    A start imports much and throws little away, and the collector would look through all of it again and again: 0.4 of
    the 1.0 s of importing FlashAttention 4.
    """
    was_enabled = gc.isenabled()
    if torch.cuda.is_initialized():
        gc.collect()  # a former engine may hold most of the device's memory
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step needs beside weights and KV cache, and whether decode steps can be captured."""

    num_bytes: int
    can_capture: bool


def build_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    limits: StepLimits,
    num_blocks: int,
    max_model_len: int,
    use_graphs: bool,
    phases: Phases,
) -> Runner:
    """Allocate the KV cache and everything else that steps need, and capture the graphs if asked to."""
    bind_cache(
        loaded.model, loaded.groups, num_blocks, config.block_size, loaded.kv_dtype, loaded.device, config.deterministic
    )
    groups = len(loaded.groups)
    if not limits.uses_device_state:
        return HostRunner(loaded.model, groups, config.block_size, limits.max_num_seqs, max_model_len, loaded.device)
    runner = _device_runner(loaded, config, limits, max_model_len, use_graphs)
    with phases("decode graphs"):
        is_captured = runner.capture(runner.decode_shapes())
    if is_captured:
        with phases("prompt graphs"):
            runner.capture_prompts(runner.prompt_shapes())
    return runner


def _device_runner(
    loaded: LoadedModel, config: EngineConfig, limits: StepLimits, max_model_len: int, use_graphs: bool
) -> DeviceRunner:
    state = DeviceState(
        len(loaded.groups),
        config.block_size,
        limits.max_num_seqs,
        max_model_len,
        limits.max_num_batched_tokens,
        loaded.device,
        limits.max_steps_in_flight + 1,
    )
    spec, *others = (group.spec for group in loaded.groups)
    can_share = not others and spec.kind == "full" and config.enable_prefix_caching and not config.deterministic
    return DeviceRunner(loaded.model, state, use_graphs, can_share)


def import_libraries(loaded: LoadedModel, config: EngineConfig) -> None:
    """Import what long prompts' attention takes from a library, before kernels are compiled beside it."""
    for _, _, head_dim in _planned_shapes(loaded, config):
        ops.import_attention(head_dim, loaded.dtype, loaded.device)


def compile_kernels(loaded: LoadedModel, config: EngineConfig, limits: StepLimits, phases: Phases) -> int:
    """Compile what steps of this model launch, many kernels at a time; returns how many.

    Without it they are compiled one by one as they are met, those of small prompts while the first requests wait. A
    model that looks at its data cannot be walked through so: what follows runs it in earnest and tells what is wrong.
    """
    if loaded.device.type != "cuda":
        return 0
    bind_cache(loaded.model, loaded.groups, 1, config.block_size, loaded.kv_dtype, loaded.device, config.deterministic)
    runner = _device_runner(loaded, config, limits, _length(loaded, config), not config.enforce_eager)
    most = limits.max_num_batched_tokens

    @torch.inference_mode()
    def launch() -> None:
        try:
            runner.warm_up()
            for num_decodes in (0, 2):
                for tokens in _PROMPT_TOKENS:
                    if num_decodes + tokens <= min(most, loaded.model.max_position):
                        counts = [1] * num_decodes + [tokens]
                        loaded.model(*_step_of(loaded, config, counts, num_decodes, past=1))
            if _EQUAL_PROMPTS[0] <= loaded.model.max_position and sum(_EQUAL_PROMPTS) <= most:
                loaded.model(*_step_of(loaded, config, _EQUAL_PROMPTS, 0))
            with phases("plans"):  # here, where threads still compile what was launched
                _plan_attention(loaded, config, limits)
            _run_largest(loaded, config, limits)
        except Exception as error:
            logger.info("not all kernels are compiled ahead: %s: %s", type(error).__name__, error)

    return ops.compile_ahead(launch)


def _length(loaded: LoadedModel, config: EngineConfig) -> int:
    return config.max_model_len if isinstance(config.max_model_len, int) else loaded.model.max_position


def measure_step(loaded: LoadedModel, config: EngineConfig, limits: StepLimits, phases: Phases) -> StepMemory:
    """Run the largest step on a cache of one block, and capture two graphs of each kind, to see what they take.

    Every further one is taken to need what the second of its kind added, since all of them share one pool.
    """
    if loaded.device.type != "cuda":
        return StepMemory(0, False)
    bind_cache(loaded.model, loaded.groups, 1, config.block_size, loaded.kv_dtype, loaded.device, config.deterministic)
    with phases("plans"):
        num_plans = _plan_attention(loaded, config, limits)
        logger.info("%d plans or kernels for the attention of long prompts", num_plans)
    with phases("memory"):
        return _measure_memory(loaded, config, limits)


def _measure_memory(loaded: LoadedModel, config: EngineConfig, limits: StepLimits) -> StepMemory:
    num_bytes = _measure_peak(loaded, config, limits)
    before = _free_bytes(loaded.device)
    if config.enforce_eager:
        return StepMemory(num_bytes, False)
    runner = _device_runner(loaded, config, limits, _length(loaded, config), True)
    largest, *others = sorted(runner.decode_shapes(), reverse=True)
    can_capture = runner.capture([largest])
    after_one = after_two = _free_bytes(loaded.device)
    if can_capture and others:
        runner.capture(others[:1])
        after_two = _free_bytes(loaded.device)
    graphs = before - after_one + (after_one - after_two) * len(others)
    if can_capture:
        graphs += _measure_prompt_graphs(runner, loaded.device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    logger.info("a step takes %.2f GiB, its graphs %.2f GiB", num_bytes / 2**30, graphs / 2**30)
    return StepMemory(num_bytes + graphs, can_capture)


def _plan_attention(loaded: LoadedModel, config: EngineConfig, limits: StepLimits) -> int:
    """Plans of long prompts' attention: before memory is measured, which they keep some of, on the thread of steps.

    Those that are there already are not built again.
    """
    sizes = (limits.max_prefill_tokens, _length(loaded, config), limits.max_num_seqs)
    shapes = _planned_shapes(loaded, config)
    return sum(ops.plan_attention(*shape, loaded.dtype, loaded.device, *sizes) for shape in shapes)


def _planned_shapes(loaded: LoadedModel, config: EngineConfig) -> set[tuple[int, int, int]]:
    """Heads, key heads and their size in layers whose long prompts a library may attend."""
    layers = [] if config.deterministic else loaded.model.attention_layers()
    return {(x.num_heads, x.num_kv_heads, x.head_dim) for x in layers if not (x.window or x.softcap or x.shares_values)}


def _measure_prompt_graphs(runner: DeviceRunner, device: torch.device) -> int:
    free, shapes = [_free_bytes(device)], runner.prompt_shapes()[::-1]
    for shape in shapes[:2]:
        runner.capture_prompts([shape])
        free.append(_free_bytes(device))
    return free[0] - free[-1] + (free[-2] - free[-1]) * len(shapes[2:]) if shapes else 0


def _free_bytes(device: torch.device) -> int:
    """Free memory, nothing kept in reserve by torch."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@torch.inference_mode()
def _measure_peak(loaded: LoadedModel, config: EngineConfig, limits: StepLimits) -> int:
    """The most memory that a step of `max_num_batched_tokens` tokens takes, with sampling for `max_num_seqs`.

    Raises CapacityError where not even that is there.
    """
    device = loaded.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _run_largest(loaded, config, limits)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"a step of max_num_batched_tokens = {limits.max_num_batched_tokens} tokens does not fit beside the "
            f"weights on {device}: lower it ({error})",
            param="max_num_batched_tokens",
        ) from error
    return torch.cuda.max_memory_allocated(device) - before


def _run_largest(loaded: LoadedModel, config: EngineConfig, limits: StepLimits) -> None:
    """A step of as many tokens as there may be, with prompts as long as the model takes them, and sampling for all."""
    total, num_decodes = limits.max_prefill_tokens, limits.max_num_batched_tokens - limits.max_prefill_tokens
    length = min(total, loaded.model.max_position)
    counts = [1] * num_decodes + [length] * (total // length) + [total % length] * (total % length > 0)
    hidden = loaded.model(*_step_of(loaded, config, counts, num_decodes))
    logits = loaded.model.compute_logits(hidden[: limits.max_num_seqs])
    rows = torch.zeros(len(logits), dtype=torch.int32, device=loaded.device)
    ops.sample_tokens(logits, rows + 1.0, rows + 50, rows + 0.9, rows * 0.1, rows.long(), rows.long())


def _step_of(
    loaded: LoadedModel, config: EngineConfig, counts: list[int], num_decodes: int, past: int = 0
) -> tuple[Tensor, Tensor, StepInputs]:
    """A step of these numbers of new tokens, behind `past` others; all pages are the null block."""
    device, total, longest = loaded.device, sum(counts), max(counts) + past
    ends = [count + past for count in counts]
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    query_start = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    query_start[1:] = (lengths - past).cumsum(0)
    table = torch.zeros((len(counts), -(-longest // config.block_size)), dtype=torch.int32, device=device)
    slots = torch.full((total,), -1, dtype=torch.int64, device=device)
    most = max(counts)
    metadata = ops.AttentionMetadata(query_start, lengths, table, slots, most, longest, num_decodes, counts, ends)
    positions = torch.arange(total, device=device) % longest
    return torch.zeros_like(positions), positions, StepInputs((metadata,) * len(loaded.groups))
