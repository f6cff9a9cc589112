"""Drives a model over the paged KV cache by hand, without the engine, and compares its logits with transformers'."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.reader import open_checkpoint
from octavo.layers.step import StepInputs
from octavo.models import CausalLM, load_model
from octavo.ops import AttentionMetadata, KVCache

TOLERANCE = 1e-4  # of the spread of the logits, in float32
GARBAGE = 37.0  # what nobody may read: a masked slot, a block that slid out of a window


@dataclass
class Sequence:
    tokens: list[int]
    tables: list[list[int]]
    computed: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)


class Driver:
    """KV caches, block tables and metadata for some sequences; `step` runs any mix of them."""

    def __init__(self, model: CausalLM, num_blocks: int = 128, block_size: int = 16) -> None:
        self.model, self.block_size = model, block_size
        self.specs = model.kv_cache_specs()
        self.group_specs = list(dict.fromkeys(self.specs))
        groups = [self.group_specs.index(spec) for spec in self.specs]
        self.caches = [
            KVCache.allocate(
                num_blocks,
                block_size,
                spec.num_kv_heads,
                spec.head_dim,
                model.dtype,
                shares_values=spec.shares_values,
            )
            for spec in self.specs
        ]
        for cache in self.caches:
            cache.k.fill_(GARBAGE)
            cache.v.fill_(GARBAGE)
        model.bind_kv_cache(self.caches, groups)
        self.groups = groups
        self.free = [
            random.Random(group).sample(range(1, num_blocks), num_blocks - 1) for group in range(len(self.group_specs))
        ]
        self.sequences: list[Sequence] = []

    def add(self, tokens: list[int], shared: Sequence | None = None, shared_tokens: int = 0) -> Sequence:
        """A sequence; with `shared` its first tokens (whole blocks) are those that the other one computed."""
        assert shared_tokens % self.block_size == 0
        blocks = shared_tokens // self.block_size
        tables = [table[:blocks] for table in shared.tables] if shared else [[] for _ in self.group_specs]
        sequence = Sequence(tokens, tables, computed=shared_tokens)
        self.sequences.append(sequence)
        return sequence

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Computes the next tokens of each sequence; requests with one token come first, as in the engine."""
        work = sorted(work, key=lambda item: item[1] != 1)
        for sequence, count in work:
            self._grow(sequence, sequence.computed + count)
        ids = [token for seq, n in work for token in seq.tokens[seq.computed : seq.computed + n]]
        positions = [position for seq, n in work for position in range(seq.computed, seq.computed + n)]
        step = StepInputs(tuple(self._metadata(work, group) for group in range(len(self.group_specs))))
        hidden = self.model(torch.tensor(ids), torch.tensor(positions), step)
        assert hidden.shape == (len(ids), self.model.hidden_size)
        logits = self.model.compute_logits(hidden)
        assert logits.shape == (len(ids), self.model.vocab_size)
        assert logits.dtype == torch.float32
        rows = iter(logits)
        for sequence, count in work:
            for position in range(sequence.computed, sequence.computed + count):
                sequence.logits[position] = next(rows)
            sequence.computed += count
            self._slide(sequence)

    def _grow(self, sequence: Sequence, length: int) -> None:
        for group, table in enumerate(sequence.tables):
            while len(table) * self.block_size < length:
                table.append(self.free[group].pop())

    def _metadata(self, work: list[tuple[Sequence, int]], group: int) -> AttentionMetadata:
        counts = [count for _, count in work]
        lengths = [sequence.computed + count for sequence, count in work]
        tables = [sequence.tables[group] for sequence, _ in work]
        width = max(len(table) for table in tables)
        slots = [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for (sequence, count), table in zip(work, tables, strict=True)
            for position in range(sequence.computed, sequence.computed + count)
        ]
        return AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            num_decodes=sum(count == 1 for count in counts),
        )

    def _slide(self, sequence: Sequence) -> None:
        """Frees and spoils the blocks that no later query of a sliding-window group may see."""
        for group, spec in enumerate(self.group_specs):
            if spec.window is None:
                continue
            table = sequence.tables[group]
            for index in range(max(0, sequence.computed - spec.window + 1) // self.block_size):
                block, table[index] = table[index], 0
                if block and not any(block in other.tables[group] for other in self.sequences):
                    self._spoil(group, block)

    def _spoil(self, group: int, block: int) -> None:
        for layer, of in enumerate(self.groups):
            if of == group:
                self.caches[layer].k[block].fill_(GARBAGE)
                self.caches[layer].v[block].fill_(GARBAGE)


def spread_weights(model: Any, seed: int = 0, std: float = 0.25) -> None:
    """Random weights under which every part of a model matters: logits spread, no norm is at one, no bias at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * std)
            elif "bias" in name:
                parameter.copy_(noise * 0.3)
            else:
                parameter.add_(noise * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)


def save_random(config: Any, path: Path, seed: int = 0, std: float = 0.25) -> Any:
    """A random model of `config`, saved to `path`; returned as the reference, in float32 with eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    spread_weights(model, seed, std)
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def random_tokens(vocab: int, length: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    return load_model(open_checkpoint(path), dtype=dtype, **options)


def assert_close(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Largest difference as a share of the spread of the expected logits, which must be a spread at all."""
    spread = (expected.max(dim=-1).values - expected.min(dim=-1).values).min().item()
    assert spread > 3.0, f"the logits of this test do not spread: {spread}"
    error = (got - expected).abs().max().item()
    assert error <= tolerance * spread, f"logits differ by {error} at a spread of {spread}"


def check_sequence(sequence: Sequence, reference: Any, tolerance: float = TOLERANCE, start: int = 0) -> None:
    got = torch.stack([sequence.logits[position] for position in range(start, len(sequence.tokens))])
    assert_close(got, reference_logits(reference, sequence.tokens)[start:], tolerance)


def greedy_tokens(model: CausalLM, prompt: list[int], count: int) -> list[int]:
    """The most likely token `count` times over, each computed in a step of its own."""
    driver = Driver(model)
    sequence = driver.add(list(prompt))
    driver.step([(sequence, len(prompt))])
    while len(sequence.tokens) < len(prompt) + count:
        sequence.tokens.append(int(sequence.logits[sequence.computed - 1].argmax()))
        driver.step([(sequence, 1)])
    return sequence.tokens[len(prompt) :]


def check_all_schedules(model: CausalLM, reference: Any, length: int = 70, tolerance: float = TOLERANCE) -> None:
    """Whole prompt, chunks, token by token, a mixed batch, a prefix hit: all logits are the reference's."""
    vocab = model.vocab_size
    prompts = [random_tokens(vocab, length - 9 * index, seed=index) for index in range(4)]

    driver = Driver(model)
    whole = driver.add(prompts[0])
    driver.step([(whole, len(whole.tokens))])
    check_sequence(whole, reference, tolerance)

    driver = Driver(model)
    chunked = driver.add(prompts[1])
    for size in itertools.chain([7, 1, 20, 3], itertools.repeat(11)):
        if chunked.computed == len(chunked.tokens):
            break
        driver.step([(chunked, min(size, len(chunked.tokens) - chunked.computed))])
    check_sequence(chunked, reference, tolerance)

    driver = Driver(model)
    decoded = driver.add(prompts[2])
    driver.step([(decoded, 5)])
    while decoded.computed < len(decoded.tokens):
        driver.step([(decoded, 1)])
    check_sequence(decoded, reference, tolerance)

    driver = Driver(model)
    sequences = [driver.add(prompt) for prompt in prompts]
    shared = 2 * driver.block_size
    driver.step([(sequences[0], shared)])
    sequences.append(driver.add(prompts[0][:shared] + random_tokens(vocab, 25, seed=9), sequences[0], shared))
    driver.step([(sequences[0], 8)])  # blocks that slide out of its windows stay for the other
    driver.step([(sequences[0], 1), (sequences[1], 17)])
    sizes = itertools.cycle([1, 13, 1, 9, 21])
    while any(sequence.computed < len(sequence.tokens) for sequence in sequences):
        todo = [sequence for sequence in sequences if sequence.computed < len(sequence.tokens)]
        driver.step([(seq, min(next(sizes), len(seq.tokens) - seq.computed)) for seq in todo])
    for sequence in sequences:
        check_sequence(sequence, reference, tolerance, start=min(sequence.logits))
