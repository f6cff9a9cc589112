"""Is the engine as right as transformers is in bf16? Teacher-forced KL divergence from a float32 reference.

    python benchmarks/gpu_kl.py MODEL [--load-format dummy] [--quantization fp8] [--text FILE] [--windows 1,8,32]

The reference is transformers' model in float32 with the weights that the engine has (dequantized) and, where the scheme
quantizes activations, with the inputs of its linear layers rounded the same way. Measured against it, over the same
tokens: transformers in bf16, the engine on whole prompts, in chunks, and decoding the second half of each window token
by token with all windows in one batch. `--windows` cuts the tokens into so many sequences, so that the kernels for few
and for many rows are met. Tokens are those of FILE, or random ones. Fails when a ratio is above --limit.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.checkpoint.base import Checkpoint, dense
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.layers.step import StepInputs
from octavo.layers.weights import WeightSource
from octavo.models import CausalLM, load_model
from octavo.ops import AttentionMetadata, KVCache
from octavo.ops.packed_weight import input_kind
from octavo.ops.reference import quantize_rows

BLOCK_SIZE = 16
ROWS = 512  # of log-probabilities that are compared at once


class PagedModel:
    """The engine's model over a KV cache of its own, with `num_sequences` sequences of up to `length` tokens."""

    def __init__(self, model: CausalLM, num_sequences: int, length: int, device: torch.device) -> None:
        self.model, self.device = model, device
        blocks = -(-length // BLOCK_SIZE)
        self.table = torch.arange(1, num_sequences * blocks + 1, dtype=torch.int32).view(num_sequences, blocks)
        caches = [
            KVCache.allocate(num_sequences * blocks + 1, BLOCK_SIZE, s.num_kv_heads, s.head_dim, model.dtype, device)
            for s in model.kv_cache_specs()
        ]
        model.bind_kv_cache(caches, [0] * len(caches))

    def step(self, tokens: Tensor, start: int) -> Tensor:
        """Logits [S, n, V] of the next tokens [S, n] of every sequence, which have `start` tokens computed already."""
        count, new = tokens.shape
        positions = torch.arange(start, start + new).repeat(count)
        rows = torch.arange(count).repeat_interleave(new)
        slots = self.table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        meta = AttentionMetadata(
            query_start=(torch.arange(count + 1, dtype=torch.int32) * new).to(self.device),
            seq_lens=torch.full((count,), start + new, dtype=torch.int32, device=self.device),
            block_table=self.table[:, : -(-(start + new) // BLOCK_SIZE)].contiguous().to(self.device),
            slot_mapping=slots.to(self.device),
            max_query_len=new,
            max_seq_len=start + new,
            num_decodes=count if new == 1 else 0,
        )
        hidden = self.model(tokens.flatten().to(self.device), positions.to(self.device), StepInputs((meta,)))
        return self.model.compute_logits(hidden).view(count, new, -1)

    def run(self, tokens: Tensor, steps: list[int]) -> Tensor:
        """Logits [S, sum(steps), V] of tokens [S, L], computed so many at a time."""
        ends = list(itertools.accumulate(steps, initial=0))
        return torch.cat([self.step(tokens[:, a:b], a) for a, b in itertools.pairwise(ends)], dim=1)


def input_rounding(weight: QuantizedWeight) -> Callable[[Tensor], Tensor]:
    """What the scheme of a weight with quantized activations does to the rows of its input, and back to their dtype."""
    kind = input_kind(weight.scheme)
    assert kind is not None

    def rounded(x: Tensor) -> Tensor:
        codes, scale = quantize_rows(x, kind, weight.input_scale)
        return (codes.float() * scale).to(x.dtype)

    return rounded


def build_reference(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: str | None
) -> nn.Module:
    """transformers' model with the engine's weights in `dtype`: rounded to bf16 where dense, dequantized otherwise."""
    config = copy.deepcopy(checkpoint.config)
    config.pop("quantization_config", None)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()
    source = WeightSource(checkpoint, torch.bfloat16, device, quantization)
    filled: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        is_tied = name == "lm_head" and checkpoint.config.get("tie_word_embeddings")
        shape = (module.weight.shape[0], module.weight.shape[1])
        if isinstance(module, nn.Embedding) or name == "lm_head":
            weight = source.embedding("model.embed_tokens" if is_tied else name, shape)
        else:
            weight = source.weight(name, shape)
            if isinstance(weight, QuantizedWeight) and weight.scheme.activations is not None:
                rounding = input_rounding(weight)
                module.register_forward_pre_hook(lambda _module, inputs, rounding=rounding: rounding(inputs[0]))
        module.weight.data.copy_(dense(weight))
        filled.add(f"{name}.weight")
    for name, parameter in model.named_parameters():
        if name not in filled:
            parameter.data.copy_(source.tensor(name, tuple(parameter.shape)))
    return model


def reference_logprobs(model: nn.Module, tokens: Tensor, device: torch.device) -> Tensor:
    """float32 [S, L, V], kept where the model is; one sequence at a time."""
    return torch.cat([model(row[None].to(device)).logits.float().log_softmax(-1) for row in tokens])


def divergence(reference: Tensor, other: Tensor) -> float:
    """Mean over all tokens of the KL divergence of `other` [S, L, V] from `reference`, both log-probabilities."""
    total, rows = 0.0, list(zip(reference.flatten(0, 1).split(ROWS), other.flatten(0, 1).split(ROWS), strict=True))
    for p, q in rows:
        total += float((p.double().exp() * (p.double() - q.double())).sum())
    return total / (reference.shape[0] * reference.shape[1])


def compare(
    checkpoint: Checkpoint, tokens: Tensor, device: torch.device, quantization: str | None = None
) -> dict[str, float]:
    """KL divergence from the float32 reference of transformers in bf16 and of each way that the engine computes.

    tokens: int64 [S, L].
    """
    count, length = tokens.shape
    reference = reference_logprobs(build_reference(checkpoint, torch.float32, device, quantization), tokens, device)
    peer = reference_logprobs(build_reference(checkpoint, torch.bfloat16, device, quantization), tokens, device)
    half = length // 2
    result = {
        "transformers": divergence(reference, peer),
        "transformers, second half": divergence(reference[:, half:], peer[:, half:]),
    }
    del peer
    model = load_model(checkpoint, dtype=torch.bfloat16, device=device, quantization=quantization, max_model_len=length)
    paged = PagedModel(model, count, length, device)
    third = max(1, length // 3)
    ways = {"whole prompt": [length], "chunks": [third, third, length - 2 * third]}
    for name, steps in ways.items():
        result[name] = divergence(reference, paged.run(tokens, steps).log_softmax(-1))
    decoded = paged.run(tokens, [half] + [1] * (length - half))[:, half:]
    result["decode"] = divergence(reference[:, half:], decoded.log_softmax(-1))
    return result


def ratios(result: dict[str, float]) -> dict[str, float]:
    """Each way's divergence as a multiple of transformers' over the same tokens."""
    whole, half = result["transformers"], result["transformers, second half"]
    return {name: result[name] / base for name, base in (("whole prompt", whole), ("chunks", whole), ("decode", half))}


def pick_tokens(checkpoint: Checkpoint, text: Path | None, count: int) -> Tensor:
    if text is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(int(checkpoint.config["vocab_size"]), (count,), generator=generator)
    ids = checkpoint.load_tokenizer().encode(text.read_text(encoding="utf-8")[: 16 * count], verbose=False)
    if len(ids) < count:
        raise SystemExit(f"{text} has {len(ids)} tokens; {count} are needed")
    return torch.tensor(ids[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--windows", default="1,8,32", help="into how many sequences the tokens are cut, in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=1.2)
    args = parser.parse_args()
    device = torch.device(args.device)
    checkpoint = open_checkpoint(args.model, load_format=args.load_format)
    tokens = pick_tokens(checkpoint, args.text, args.tokens)
    worst = 0.0
    print("| windows | way | KL | transformers bf16 | ratio |\n|---|---|---|---|---|")
    for windows in map(int, args.windows.split(",")):
        with torch.inference_mode():
            cut = tokens[: len(tokens) // windows * windows].view(windows, -1)
            result = compare(checkpoint, cut, device, args.quantization)
        for name, ratio in ratios(result).items():
            print(f"| {windows} | {name} | {result[name]:.3e} | {result[name] / ratio:.3e} | {ratio:.2f} |", flush=True)
            worst = max(worst, ratio)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not worst <= args.limit:
        raise SystemExit(f"a ratio of {worst:.2f} is above {args.limit}")


if __name__ == "__main__":
    main()
