"""Runs inside another program's environment, so it imports nothing of Octavo's: what that program computes or writes.

peer_logits.py transformers CHECKPOINT TOKENS.json OUT.npy    float32 logits [T, V] of the tokens
peer_logits.py vllm CHECKPOINT TOKENS.json OUT.npz            ids and log-probabilities [T-1, 100] of the likeliest
peer_logits.py write MODEL SCHEME DIRECTORY                   a checkpoint of LLM Compressor's, rounded to nearest
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

LIKELIEST = 100


def dequantized(checkpoint: str, tokens: list[int]) -> Any:
    """transformers' float32 model. Its 4-bit floats are dequantized to bfloat16 whatever the model's dtype is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    is_fp4 = "fp4" in AutoConfig.from_pretrained(checkpoint).quantization_config["format"]
    dtype = torch.bfloat16 if is_fp4 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    with torch.inference_mode():
        model(torch.tensor([tokens[:1]]))  # the first forward pass dequantizes
    return torch.nn.Module.float(model) if is_fp4 else model  # transformers' own float() refuses what was quantized


def transformers(checkpoint: str, tokens: list[int], out: str) -> None:
    import torch

    with torch.inference_mode():
        np.save(out, dequantized(checkpoint, tokens)(torch.tensor([tokens]), use_cache=False).logits[0].numpy())


def weights(checkpoint: str, tokens: list[int], out: str) -> None:
    import torch

    modules = dequantized(checkpoint, tokens).named_modules()
    arrays: dict[str, Any] = {n: m.weight.detach().numpy() for n, m in modules if isinstance(m, torch.nn.Linear)}
    np.savez(out, **arrays)


def vllm(checkpoint: str, tokens: list[int], out: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint, dtype="bfloat16", max_model_len=len(tokens) + 1, max_logprobs=LIKELIEST, enforce_eager=True,
        enable_prefix_caching=False, max_num_seqs=1,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=LIKELIEST)
    entries = llm.generate([{"prompt_token_ids": tokens}], params)[0].prompt_logprobs[1:]
    best = [sorted(entry.items(), key=lambda item: item[1].rank)[:LIKELIEST] for entry in entries]
    ids = [[token for token, _ in row] for row in best]
    np.savez(out, ids=ids, logprobs=[[found.logprob for _, found in row] for row in best])


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
    command, first, second, third = sys.argv[1:]
    if command == "write":
        write(first, second, third)
    else:
        with open(second) as file:
            tokens = json.load(file)
        {"transformers": transformers, "weights": weights, "vllm": vllm}[command](first, tokens, third)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
