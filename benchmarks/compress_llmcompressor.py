"""How long LLM Compressor takes for what compress_gptq.py does: GPTQ, W4A16 in groups of 64, on the same windows.

Run it with the Python of an environment that holds llmcompressor, beside the other script:

    PEER/bin/python benchmarks/compress_llmcompressor.py --model DIR --calibration-file valid.txt

DIR is a plain checkpoint (`octavo convert demo --output-dir DIR`).
"""

from __future__ import annotations

import argparse
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration-file", required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()

    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.perf_counter()  # imports left out, tokenizing included
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.calibration_file, encoding="utf-8") as file:
        ids = tokenizer(file.read(), add_special_tokens=False)["input_ids"]
    windows = [ids[i * args.length : (i + 1) * args.length] for i in range(args.samples)]
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * args.length] * args.samples})
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64)
    recipe = GPTQModifier(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"]
    )
    with tempfile.TemporaryDirectory() as directory:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        oneshot(
            model=model,
            tokenizer=tokenizer,
            dataset=data,
            recipe=recipe,
            max_seq_length=args.length,
            num_calibration_samples=args.samples,
            shuffle_calibration_samples=False,
            output_dir=directory,
        )
        print(f"RESULT llmcompressor GPTQ W4A16 g64: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
