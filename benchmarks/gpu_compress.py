"""GPTQ of a large random model on a GPU: seconds by phase, peak memory, each layer's error.

    python benchmarks/gpu_compress.py CONFIG_DIRECTORY [--samples 256] [--length 2048] [--layers 32] [--no-align]
    python benchmarks/gpu_compress.py --compare        # small shapes: what the GPU gives against what the CPU gives

CONFIG_DIRECTORY holds a config.json of a Llama or Qwen3 shape. Its checkpoint is made up on the spot, in bfloat16, one
shard a block, and read back block by block as any other; calibration is on random tokens, so no tokenizer is needed.

What an H200 should need for an 8B Llama, W4A16, 256 samples of 2,048 tokens (T = 524,288), at 790 TFLOP/s in bfloat16
and 50 in float32, at full speed:

    forward     5 passes (2 with --no-align) of 2 x 218e6 x T + attention = 0.25 PFLOP      50 s
    statistics  2 K^2 T a group (K = 4,096 three times, 14,336), 0.58 of it = 0.16 PFLOP    7 s
                the same for the drift, all of it = 0.27 PFLOP (none with --no-align)      11 s
    quantize    factors, column updates and errors: 8 TFLOP a block in float32              5 s
                aims: 9 TFLOP a block in float32 (none with --no-align)                     6 s
                208 spans of 128 columns a block, about 0.2 ms each                         1 s
                scales: 12 trials a group, about 70 passes over 218e6 weights               2 s
    read        16 GB from the disk, in a thread beside the rest                       hidden
    write       3.6 GB of blocks, then 5.7 GB of shards                                10 - 15 s
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.compress.calibration import CalibrationSpec
from octavo.compress.checkpoint_source import CheckpointSource
from octavo.compress.empty_model import empty_model
from octavo.compress.job import CompressionJob
from octavo.compress.open_source import open_source
from octavo.modifiers import GPTQModifier


def make_checkpoint(config: dict[str, Any], folder: Path, device: torch.device) -> int:
    """Random weights for a config, scaled so that hidden states neither vanish nor grow; returns the bytes."""
    generator = torch.Generator(device=device).manual_seed(0)
    model = empty_model(config, torch.bfloat16)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    index: dict[str, str] = {}
    total = 0

    def drawn(name: str, shape: torch.Size) -> torch.Tensor:
        is_norm = len(shape) == 1
        scale = 0.1 if is_norm else 1.0 if "embed" in name else shape[1] ** -0.5
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(float(is_norm), scale, generator=generator).cpu()

    for name, tensor in model.state_dict().items():
        shards.setdefault(".".join(name.split(".")[:3]), {})[name] = tensor
    for number, (_, tensors) in enumerate(shards.items()):
        file = f"shard-{number:03d}.safetensors"
        made = {name: drawn(name, tensor.shape) for name, tensor in tensors.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def random_samples(vocabulary: int, samples: int, length: int) -> list[list[int]]:
    """Token ids, as a data set."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (samples, length), generator=generator).tolist()


def compress(model: Path, output: Path, samples: int, length: int, device: str, align: bool = True) -> dict[str, Any]:
    """GPTQ W4A16; the report."""
    source = open_source(str(model), device=device)
    assert isinstance(source, CheckpointSource)
    data = random_samples(source.config_dict()["vocab_size"], samples, length)
    spec = CalibrationSpec(data, num_calibration_samples=samples, max_seq_length=length)
    recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"], align=align)
    return CompressionJob(source, [recipe], spec, None).run(output, False, print).report


def measure(arguments: argparse.Namespace) -> None:
    """The large run."""
    config = json.loads((Path(arguments.config) / "config.json").read_text())
    config |= {"num_hidden_layers": arguments.layers or config["num_hidden_layers"], "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        model, output = folder / "model", folder / "compressed"
        started = time.perf_counter()
        if not (model / "config.json").exists():
            model.mkdir(parents=True)
            total = make_checkpoint(config, model, torch.device(arguments.device))
            print(f"{total / 1e9:.1f} GB made up in {time.perf_counter() - started:.1f} s", flush=True)
        started = time.perf_counter()
        report = compress(model, output, arguments.samples, arguments.length, arguments.device, arguments.align)
        wall = time.perf_counter() - started
    print(f"| {' | '.join(report['seconds'])} | with opening |")
    print(f"| {' | '.join(f'{value:.1f}' for value in report['seconds'].values())} | {wall:.1f} |")
    print(
        f"peak GPU memory {report['peak_device_memory_bytes'] / 1e9:.2f} GB, host "
        f"{report['peak_memory_bytes'] / 1e9:.2f} GB; checkpoint {report['size']['after_bytes'] / 1e9:.2f} GB"
    )
    layers = report["layers"]
    print(f"mean relative output error {report['mean_error']:.5f}; by kind of layer, first and last block:")
    kinds = dict.fromkeys(layer["name"].split(".", 3)[3] for layer in layers)
    for kind in kinds:
        errors = [layer["error"] for layer in layers if layer["name"].endswith(kind)]
        print(f"  {kind:24} {errors[0]:.5f} {errors[-1]:.5f}")
    print("\n".join(report["notes"][:10]))


SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def compare() -> None:
    """The same small model in float32 on both: the share of codes that agree, and the errors."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        make_checkpoint(SMALL, folder / "model", torch.device("cpu"))
        reports = {d: compress(folder / "model", folder / d, 16, 256, d) for d in ("cpu", "cuda")}
        stored = {d: _tensors(folder / d) for d in reports}
    assert set(stored["cpu"]) == set(stored["cuda"])
    packed = [name for name in stored["cpu"] if name.endswith("weight_packed")]
    for name in packed:
        both = [stored[d][name].view(torch.uint8) for d in ("cpu", "cuda")]
        nibbles = [torch.stack((t & 15, t >> 4)) for t in both]
        print(f"  {name:50} {100 * float((nibbles[0] == nibbles[1]).float().mean()):.2f} % of the codes agree")
    print({d: round(report["mean_error"], 6) for d, report in reports.items()})


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", nargs="?", help="directory with a config.json")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="blocks, instead of the config's")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-align", dest="align", action="store_false", help="GPTQ without its second stream")
    parser.add_argument("--keep", help="make model and result in this directory and leave them there")
    parser.add_argument("--compare", action="store_true", help="small shapes on CPU and GPU")
    arguments = parser.parse_args()
    if arguments.compare:
        compare()
    elif arguments.config:
        measure(arguments)
    else:
        parser.error("give a config directory or --compare")


if __name__ == "__main__":
    main()
