"""Runs inside another program's environment, so it imports nothing of Octavo's: what that program computes or writes.

peer_logits.py transformers CHECKPOINT TOKENS.json OUT.npy    float32 logits [T, V] of the tokens; with one more path,
                                                              also float32 weights of linear layers, by name (.npz)
peer_logits.py vllm CHECKPOINT TOKENS.json OUT.npy DTYPE      float32 logits [T-1, V] that vLLM computed in DTYPE
peer_logits.py layers CHECKPOINT TOKENS.json OUT.npz DTYPE    what vLLM's linear layers got and gave: NAME.input [T, K],
                                                              NAME.output [T, N]
peer_logits.py write MODEL SCHEME DIRECTORY                   a checkpoint of LLM Compressor's, rounded to nearest
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

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


def transformers(checkpoint: str, tokens: list[int], out: str, weights: str | None = None) -> None:
    import torch

    with torch.inference_mode():
        model = dequantized(checkpoint, tokens)
        np.save(out, model(torch.tensor([tokens]), use_cache=False).logits[0].numpy())
    if weights is not None:
        linear = {n: m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        arrays: dict[str, Any] = {name: weight.detach().numpy() for name, weight in linear.items()}
        np.savez(weights, **arrays)


def in_vllm(checkpoint: str, tokens: list[int], dtype: str, prepare: Callable[[Any], None]) -> None:
    """Run one prompt through vLLM, in this process, with its model as `prepare` leaves it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint, dtype=dtype, max_model_len=len(tokens) + 1, max_num_batched_tokens=len(tokens) + 1,
        enforce_eager=True, enable_prefix_caching=False, max_num_seqs=1,
    )  # fmt: skip
    llm.apply_model(prepare)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    llm.generate([{"prompt_token_ids": tokens}], params)


def vllm(checkpoint: str, tokens: list[int], out: str, dtype: str) -> None:
    kept: list[Any] = []

    def prepare(model: Any) -> None:
        plain = model.compute_logits

        def compute_logits(hidden: Any) -> Any:
            logits = plain(hidden)
            if len(hidden) > 1:  # those of the prompt; one row is for the token that is sampled
                kept.append(logits.float().numpy().copy())
            return logits

        model.compute_logits = compute_logits

    in_vllm(checkpoint, tokens, dtype, prepare)
    np.save(out, np.concatenate(kept))


def layers(checkpoint: str, tokens: list[int], out: str, dtype: str) -> None:
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

    in_vllm(checkpoint, tokens, dtype, prepare)
    np.savez(out, **kept)


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
