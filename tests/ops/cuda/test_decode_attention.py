"""Attention of decodes in CUDA, thread by thread under the emulator, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged import Step, exact_attention, relative_error
from torch import Tensor

from octavo import ops
from octavo.ops import reference
from octavo.ops.cuda import compiler, decode_attention
from octavo.ops.cuda.decode_attention import Shape, Sizes

HERE = Path(__file__).parent
SOURCES = Path(decode_attention.__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
needs_gpu = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
TOLERANCE, EPS = 6e-3, 1e-5

CASES = [
    # lengths, block size, key heads, group, head size, blocks, warps, stages, least
    ([1, 64, 200, 0, 17], 16, 2, 4, 128, 5, 3, 6, 1),
    ([300], 32, 1, 8, 64, 7, 2, 2, 1),
    ([40, 0, 0, 33], 16, 3, 3, 64, 1, 4, 4, 1),
    ([5, 16, 48], 64, 2, 1, 128, 40, 2, 4, 1),
    ([150, 90], 16, 1, 2, 128, 9, 2, 2, 6),
    ([0, 20, 0, 33, *[0] * 12], 16, 2, 2, 64, 3, 2, 2, 1),  # padded as a graph's batch is
]


def queries(step: Step, heads: int, channels: int, seed: int = 3) -> Tensor:
    q = torch.randn(step.num_rows, heads, channels, generator=torch.Generator().manual_seed(seed))
    return q.bfloat16().to(step.cache.k.device)


def compiled(shape: Shape, sizes: Sizes, folder: Path) -> ctypes.CDLL:
    library = folder / "kernel.so"
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{HERE}", f"-I{SOURCES}"]
    defines = [f"-D{name}={value}" for name, value in sizes.macros(shape).items()]
    source = HERE / "decode_attention_emulated.cpp"
    subprocess.run(["g++", *options, *defines, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


class Emulated:
    """Launches by `decode_attention` that an emulation carries out; room for parts is NaN before."""

    def __init__(self, shape: Shape, sizes: Sizes, blocks: int, folder: Path, least: int = 1) -> None:
        self.shape, self.blocks, self.least = shape, blocks, least
        self.library = compiled(shape, sizes, folder)
        self.counters = torch.zeros(blocks, dtype=torch.int32)

    def __call__(
        self, given: tuple[Tensor | None, ...], step: Step, out: Tensor, requests: int, counts: Tensor | None = None
    ) -> None:
        """given: what q, scales, columns, positions, slots, cosines and sines, and norms point to."""
        cache, meta, shape = step.cache, step.meta, self.shape
        parts = torch.full((2 * self.blocks, shape.group, shape.head_dim), torch.nan)
        stats = torch.full((2 * self.blocks, shape.group, 2), torch.nan)
        rows = ctypes.c_longlong(cache.num_blocks * cache.num_kv_heads * cache.block_size)
        tensors = (*given, meta.block_table, meta.seq_lens, counts, out, parts, stats, self.counters)
        q = given[0]
        assert q is not None
        numbers = (requests, self.least, meta.block_table.stride(0), q.stride(0))
        factors = (ctypes.c_float(shape.head_dim**-0.5 * 1.4426950408889634), ctypes.c_float(EPS))
        self.library.run(
            self.blocks, pointer(cache.k), pointer(cache.v), rows, *map(pointer, tensors), *numbers, *factors
        )
        assert not self.counters.any()


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "block_size", "kv_heads", "group", "head_dim", "blocks", "warps", "stages", "least"), CASES
)
def test_every_thread_does_its_part(
    lengths: list[int], block_size: int, kv_heads: int, group: int, head_dim: int, blocks: int, warps: int, stages: int,
    least: int, tmp_path: Path,
) -> None:  # fmt: skip
    step = Step([1] * len(lengths), lengths, block_size, kv_heads, head_dim, torch.device("cpu"), torch.bfloat16)
    q = queries(step, kv_heads * group, head_dim)
    out = torch.full((len(lengths) + 1, kv_heads * group * head_dim), torch.nan, dtype=torch.bfloat16)
    run = Emulated(Shape(head_dim, group, kv_heads, block_size), Sizes(warps, stages, 1), blocks, tmp_path, least)
    live = step.meta.seq_lens > 0
    for _ in range(2):  # the second finds the counters as the first left them
        run((q, *[None] * 7), step, out, len(lengths))
        assert relative_error(out[:-1][live], exact_attention(q, step, head_dim**-0.5)[live]) < TOLERANCE
        assert not out[:-1][~live].any() and out[-1].isnan().all()
        out.fill_(torch.nan)
    some = (len(lengths) + 1) // 2
    counts = torch.tensor([some], dtype=torch.int32)  # as in the graph of a step with prompts
    run((q, *[None] * 7), step, out, len(lengths), counts)
    live[some:] = False
    assert relative_error(out[:-1][live], exact_attention(q, step, head_dim**-0.5)[live]) < TOLERANCE
    assert out[some:].isnan().all()


def fused_inputs(step: Step, heads: int, rotary: int, has_norm: bool, is_scaled: bool) -> tuple[Tensor | None, ...]:
    """qkv, scales of its rows and of its columns, cosines and sines, both norms."""
    generator, cache, device = torch.Generator().manual_seed(7), step.cache, step.cache.k.device
    width = (heads + 2 * cache.num_kv_heads) * cache.head_dim
    qkv = torch.randn(step.num_rows, width, generator=generator).bfloat16()
    scales = 0.5 + torch.rand(step.num_rows, 1, generator=generator) if is_scaled else None
    columns = 0.5 + torch.rand(width, generator=generator) if is_scaled else None
    angles = torch.arange(max(step.lengths) + 1)[:, None] * torch.rand(rotary // 2, generator=generator)
    norms = [torch.randn(cache.head_dim, generator=generator).bfloat16() if has_norm else None for _ in range(2)]
    tensors = (qkv, scales, columns, torch.cat((angles.cos(), angles.sin()), dim=1), *norms)
    return tuple(None if x is None else x.to(device) for x in tensors)


def exact_step(
    step: Step, given: tuple[Tensor | None, ...], heads: int, interleaved: bool
) -> tuple[Tensor, ops.KVCache]:
    """What comes out, and the pages after, in float32."""
    qkv, scales, columns, cos_sin, *norms = given
    assert qkv is not None and cos_sin is not None
    cache = ops.KVCache(step.cache.k.float(), step.cache.v.float())
    whole = qkv.float() if scales is None else qkv.float() * scales * columns
    wide = [None if x is None else x.float() for x in norms]
    shape = (heads, cache.num_kv_heads, cache.head_dim)
    q = reference.rotary_and_store(whole, step.positions, cos_sin, cache, step.meta, *shape, *wide, EPS, interleaved)
    return reference.paged_attention(q, cache, step.meta, cache.head_dim**-0.5, None, None, None), cache


def poison_newest(step: Step) -> None:
    """Nothing reads the newest slot before it is written."""
    newest = step.meta.slot_mapping[step.meta.slot_mapping >= 0]
    for x in (step.cache.k, step.cache.v):
        x[newest // step.cache.block_size, :, newest % step.cache.block_size] = torch.nan


def assert_same_pages(ours: ops.KVCache, exact: ops.KVCache) -> None:
    for x, y in ((ours.k, exact.k), (ours.v, exact.v)):
        assert torch.equal(x.isnan(), y.isnan())
        assert relative_error(x.nan_to_num(), y.nan_to_num()) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize(
    ("case", "rotary", "interleaved", "has_norm", "is_scaled"),
    [
        (0, 128, False, False, True),
        (1, 32, False, True, False),
        (2, 64, True, True, True),
        (4, 96, False, False, False),
    ],
)
def test_fused_with_rotation_and_store(
    case: int, rotary: int, interleaved: bool, has_norm: bool, is_scaled: bool, tmp_path: Path
) -> None:
    lengths, block_size, kv_heads, group, head_dim, blocks, warps, stages, least = CASES[case]
    step = Step([1] * len(lengths), lengths, block_size, kv_heads, head_dim, torch.device("cpu"), torch.bfloat16)
    poison_newest(step)
    heads = kv_heads * group
    given = fused_inputs(step, heads, rotary, has_norm, is_scaled)
    expected, pages = exact_step(step, given, heads, interleaved)
    qkv, scales, columns, cos_sin, *norms = given
    shape = Shape(head_dim, group, kv_heads, block_size, True, rotary, interleaved, has_norm, has_norm)
    out = torch.full((len(lengths), heads * head_dim), torch.nan, dtype=torch.bfloat16)
    run = Emulated(shape, Sizes(warps, stages, 1), blocks, tmp_path, least)
    run((qkv, scales, columns, step.positions, step.meta.slot_mapping, cos_sin, *norms), step, out, len(lengths))
    live = step.meta.seq_lens > 0
    assert relative_error(out[live], expected[live]) < TOLERANCE
    assert not out[~live].any()
    assert_same_pages(step.cache, pages)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_sizes_fit_a_multiprocessor_and_leave_a_stage_to_one_warp(head_dim: int, group: int) -> None:
    """A warp that took turns with others could find a stage a turn behind, and take what is there for its own."""
    shape = Shape(head_dim, group, 8, 16, True, head_dim)
    sizes = decode_attention.sizes_for(shape)
    assert sizes.stages % sizes.warps == 0
    declared = 17920  # bytes that a block declares itself, and what the hardware keeps of each
    assert sizes.resident * (sizes.shared_bytes(shape) + declared) <= 227 << 10
    assert sizes.resident * (sizes.warps + 2) * 32 * 168 <= 65536  # registers: as many as NVRTC 13.0 gives the largest


@needs_compiler
def test_a_nan_stays_in_its_request(tmp_path: Path) -> None:
    step = Step([1, 1], [33, 41], 16, 1, 64, torch.device("cpu"), torch.bfloat16)
    step.cache.k[int(step.meta.block_table[0, 0]), :, 3] = torch.nan
    out = torch.zeros(2, 128, dtype=torch.bfloat16)
    run = Emulated(Shape(64, 2, 1, 16), Sizes(2, 2, 1), 3, tmp_path)
    run((queries(step, 2, 64), *[None] * 7), step, out, 2)
    assert out[0].isnan().all() and not out[1].isnan().any()


def random_step(seed: int, device: torch.device) -> tuple[Step, int]:
    choose = random.Random(seed)
    count = choose.choice((1, 2, 7, 60, 300))
    lengths = [choose.choice((0, 1, 16, 17, choose.randint(1, 3000))) for _ in range(count)] + [choose.randint(1, 900)]
    kv_heads, group, head_dim = choose.choice((1, 2, 8)), choose.randint(1, 8), choose.choice((64, 128))
    block_size = choose.choice((16, 32, 64, 128))
    step = Step([1] * len(lengths), lengths, block_size, kv_heads, head_dim, device, torch.bfloat16, seed=seed)
    return step, kv_heads * group


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_steps_on_the_gpu(seed: int, device: torch.device) -> None:
    step, heads = random_step(seed, device)
    requests, head_dim = len(step.rows), step.cache.head_dim
    q, live = queries(step, heads, head_dim), step.meta.seq_lens > 0
    out = torch.full((requests, heads * head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    for blocks in (None, 1, 500):
        decode_attention.decode(q, step.cache, step.meta, out.fill_(torch.nan), requests, head_dim**-0.5, blocks=blocks)
        assert relative_error(out[live], exact_attention(q, step, head_dim**-0.5)[live]) < TOLERANCE
        assert not out[~live].any()
    some = requests // 2
    meta = replace(step.meta, counts=torch.tensor([some, requests], dtype=torch.int32, device=device))
    before = out.clone().fill_(torch.nan)
    decode_attention.decode(q, step.cache, meta, before, requests, head_dim**-0.5)
    assert before[some:].isnan().all() and not before[:some].isnan().any()
    poison_newest(step)
    rotary, interleaved = random.Random(seed).choice((32, 64)), bool(seed % 2)
    given = fused_inputs(step, heads, rotary, seed % 3 == 0, seed % 4 == 0)
    expected, pages = exact_step(step, given, heads, interleaved)
    qkv, scales, columns, cos_sin, *norms = given
    assert qkv is not None and cos_sin is not None
    args = (qkv, scales, columns, step.positions, cos_sin, step.cache, step.meta)
    decode_attention.rotary_and_attend(*args, out.fill_(torch.nan), head_dim**-0.5, *norms, EPS, interleaved)
    assert relative_error(out[live], expected[live]) < TOLERANCE
    assert not out[~live].any()
    assert_same_pages(step.cache, pages)


@needs_gpu
@pytest.mark.gpu
def test_it_replays_in_a_graph_for_other_lengths(device: torch.device) -> None:
    step = Step([1] * 4, [700, 1, 90, 0], 16, 2, 128, device, torch.bfloat16)
    q = queries(step, 8, 128)
    out = torch.empty(4, 1024, dtype=torch.bfloat16, device=device)
    decode_attention.decode(q, step.cache, step.meta, out, 4, 0.1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention.decode(q, step.cache, step.meta, out, 4, 0.1)
    for lengths in ([700, 1, 90, 0], [650, 1, 33, 0], [5, 1, 64, 0]):
        step.meta.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out[:3], exact_attention(q, step, 0.1)[:3]) < TOLERANCE
        assert not out[3].any()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "launches"), [(40, 1), (16, 0)])
def test_steps_of_many_requests_go_to_it(
    requests: int, launches: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as there are more pairs of a request and a key head than multiprocessors, 132 on an H200."""
    from octavo.ops.triton.attention import paged_attention  # imports triton
    from octavo.ops.triton.attention_fused import rotary_and_attend

    step = Step([1] * requests, [50 + 9 * i for i in range(requests)], 16, 8, 128, device, torch.bfloat16)
    q, seen = queries(step, 32, 128), []
    for name in ("decode", "rotary_and_attend"):
        call = getattr(decode_attention, name)
        monkeypatch.setattr(decode_attention, name, lambda *a, call=call, **k: (seen.append(1), call(*a, **k)))
    out = paged_attention(q, step.cache, step.meta, 0.1, None, None, None)
    assert relative_error(out, exact_attention(q, step, 0.1)) < TOLERANCE and len(seen) == launches
    paged_attention(q, step.cache, step.meta, 0.1, 64, None, None)  # a window is Triton's
    assert len(seen) == launches
    given = fused_inputs(step, 32, 128, True, False)
    expected, pages = exact_step(step, given, 32, False)
    qkv, _, _, cos_sin, *norms = given
    args = (qkv, step.positions, cos_sin, step.cache, step.meta, 32, 8, 128, 128**-0.5, None, None, *norms, EPS)
    assert relative_error(rotary_and_attend(*args), expected) < TOLERANCE and len(seen) == 2 * launches
    assert_same_pages(step.cache, pages)
