"""How far are an engine's log-probabilities from those of float32, and how far would any bf16 engine's be?

    python benchmarks/gpu_probe.py CHECKPOINT [--ours PROBE.json] [--other PROBE.json] [--vocab 100000] [--json FILE]

A probe file holds, for each of four fixed random prompts, the log-probabilities of its tokens but the first. The
reference computes them with one layer of transformers' model in float32 (no TF32) that takes the weights of each layer
in turn, dequantized; where the scheme quantizes activations, inputs of quantized layers are rounded the same way.

Two perturbed references tell what differences mean. "bf16 inputs" rounds the input of every linear layer to bf16 first,
"bf16" also its output and what a decoder layer returns. A code that a small change moves to its neighbour changes by a
whole step, so that quantized activations amplify roundings: what two right engines differ by is not far below these.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gpu_kl
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.checkpoint.base import Checkpoint, dense
from octavo.checkpoint.quantized import QuantizedWeight
from octavo.checkpoint.reader import open_checkpoint
from octavo.layers.weights import WeightSource

LENGTHS = (17, 64, 200, 500)
VARIANTS = ("float32", "bf16 inputs", "bf16")

Probe = list[list[float]]


def probe_prompts(vocab: int) -> list[list[int]]:
    """The four prompts that probe files are about."""
    rng = random.Random("probe")
    return [[rng.randint(100, vocab) for _ in range(length)] for length in LENGTHS]


def to_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class Reference:
    """A causal language model of transformers whose only layer stands for each layer of the checkpoint in turn.

    dense_dtype: what the engines hold dense weights in, before all becomes float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        quantization: str | None = None,
        dense_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = copy.deepcopy(checkpoint.config)
        config.pop("quantization_config", None)
        self.num_layers = int(config["num_hidden_layers"])
        # Random numbers for weights that are replaced would take longer than all else.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config | {"num_hidden_layers": 1, "layer_types": None}), dtype=torch.float32
            ).eval()
        with device:
            self.rotary = type(model.model.rotary_emb)(model.config)
        self.model = model.to_empty(device=device)
        self.device = device
        self.source = WeightSource(checkpoint, dense_dtype, device, quantization)
        self.is_tied = bool(checkpoint.config.get("tie_word_embeddings"))
        self.variant = VARIANTS[0]
        self.inputs: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._round_input)
                module.register_forward_hook(self._round_output)

    def _round_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        x = inputs[0] if self.variant == "float32" else to_bf16(inputs[0])
        return self.inputs[module](x) if module in self.inputs else x

    def _round_output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return to_bf16(output) if self.variant == "bf16" else output

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Give a module the checkpoint's parameters under `prefix`."""
        for name, part in module.named_modules():
            full = f"{prefix}.{name}" if name else prefix
            if isinstance(part, nn.Linear) and full != "lm_head":
                weight = self.source.weight(full, (part.weight.shape[0], part.weight.shape[1]))
                part.weight.data.copy_(dense(weight))
                self.inputs.pop(part, None)
                if isinstance(weight, QuantizedWeight) and weight.scheme.activations is not None:
                    self.inputs[part] = gpu_kl.input_rounding(weight)
                if part.bias is not None:
                    part.bias.data.copy_(self.source.bias(full, part.bias.shape[0]))
            elif isinstance(part, (nn.Embedding, nn.Linear)):
                table = "model.embed_tokens" if self.is_tied else full
                part.weight.data.copy_(
                    dense(self.source.embedding(table, (part.weight.shape[0], part.weight.shape[1])))
                )
            else:
                for parameter, value in part.named_parameters(recurse=False):
                    value.data.copy_(self.source.tensor(f"{full}.{parameter}", tuple(value.shape)))

    def logprobs(self, prompts: Sequence[list[int]], variants: Sequence[str] = VARIANTS) -> dict[str, Probe]:
        """The probe of each variant: natural logarithms of the probabilities of each prompt's tokens but the first."""
        body = self.model.model
        self.fill(body.embed_tokens, "model.embed_tokens")
        starts = [body.embed_tokens(torch.tensor([prompt], device=self.device)) for prompt in prompts]
        states = {variant: list(starts) for variant in variants}
        places = [self.rotary(x, torch.arange(x.shape[1], device=self.device)[None]) for x in starts]
        for i in range(self.num_layers):
            self.fill(body.layers[0], f"model.layers.{i}")
            for self.variant in variants:
                rows = [
                    body.layers[0](x, attention_mask=None, position_embeddings=place)
                    for x, place in zip(states[self.variant], places, strict=True)
                ]
                states[self.variant] = [to_bf16(x) for x in rows] if self.variant == "bf16" else rows
        self.fill(body.norm, "model.norm")
        self.fill(self.model.lm_head, "lm_head")
        return {variant: self._finish(variant, states[variant], prompts) for variant in variants}

    def _finish(self, variant: str, states: list[Tensor], prompts: Sequence[list[int]]) -> Probe:
        self.variant = variant
        probe = []
        for x, prompt in zip(states, prompts, strict=True):
            logprobs = self.model.lm_head(self.model.model.norm(x))[0, :-1].log_softmax(-1)
            following = torch.tensor(prompt[1:], device=self.device)
            probe.append(logprobs.gather(1, following[:, None])[:, 0].tolist())
        return probe


def difference(a: Probe, b: Probe) -> float:
    """Mean absolute difference a token of two probes of the same prompts."""
    if [len(row) for row in a] != [len(row) for row in b]:
        raise SystemExit(f"probes of other prompts: {[len(row) for row in a]} and {[len(row) for row in b]} numbers")
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--ours", type=Path, help="a probe file of this engine")
    parser.add_argument("--other", type=Path, help="a probe file of another engine, such as vLLM")
    parser.add_argument("--vocab", type=int, default=100000, help="the largest token of the prompts")
    parser.add_argument("--json", type=Path, help="write the reference's probe here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    given = {name: json.loads(path.read_text()) for name in ("ours", "other") if (path := getattr(args, name))}
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):  # the others may multiply in less than float32
        reference = Reference(open_checkpoint(args.checkpoint), torch.device(args.device))
        probes = reference.logprobs(probe_prompts(args.vocab)) | given
    if args.json:
        args.json.write_text(json.dumps(probes["float32"]))
    for a, b in itertools.combinations(probes, 2):
        print(f"PROBE {a} - {b}: mean absolute difference {difference(probes[a], probes[b]):.4f}")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
