"""Random weights from config.json alone (load_format="dummy"): for measuring speed without a download."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.quantization_config import QuantizationConfig, class_of
from octavo.checkpoint.quantized import QuantizedWeight, stays_quantized
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError

STD = 0.02
TILE = 1_048_573  # a prime, so that rows of a repeated tile do not fall on each other
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DummyCheckpoint(Checkpoint):
    """Weights made up from the name, the shape and a seed; the same ones each time.

    The shape is what the caller asks for, or what transformers gives the architecture when nothing is asked.
    """

    def __init__(self, path: Path, seed: int = 0) -> None:
        from octavo.checkpoint.safetensors_checkpoint import read_json

        if path.is_file():
            from octavo.checkpoint.gguf_config import huggingface_config
            from octavo.checkpoint.gguf_file import GGUFFile

            config = huggingface_config(GGUFFile(path))
        else:
            config = read_json(path / "config.json")
        super().__init__(path, config, {})
        self._seed = seed
        self._quantization = QuantizationConfig.of(config, path)
        self._known: dict[str, tuple[int, ...]] | None = None
        self._tile: Tensor | None = None
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        self._dtype = DTYPES.get(dtype, torch.bfloat16)

    def names(self) -> list[str]:
        return list(self._shapes())

    def __contains__(self, name: object) -> bool:
        return name in self._shapes()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        shape = self._shape(name, shape)
        if len(shape) < 2:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=self._dtype)
        count = 1
        for size in shape:
            count *= size
        tile = self._random_tile()
        start = self._hash(name) % TILE
        repeated = tile.roll(-start).repeat(-(-count // TILE))
        return repeated[:count].view(shape).to(self._dtype)

    def weight(self, module: str, shape: tuple[int, ...] | None = None) -> Tensor | QuantizedWeight:
        name = f"{module}.weight"
        scheme = self._scheme(module)
        shape = self._shape(name, shape)
        if scheme is None or len(shape) != 2:
            return self.tensor(name, shape)
        return self._quantized(name, scheme, (shape[0], shape[1]))

    def load_tokenizer(self) -> Any:
        if self.path.is_file():
            from octavo.checkpoint.gguf_checkpoint import GGUFCheckpoint

            return GGUFCheckpoint(self.path).load_tokenizer()
        from octavo.checkpoint.safetensors_checkpoint import load_directory_tokenizer

        return load_directory_tokenizer(self.path)

    def _hash(self, name: str) -> int:
        return zlib.crc32(f"{self._seed}:{name}".encode())

    def _random_tile(self) -> Tensor:
        if self._tile is None:
            generator = torch.Generator().manual_seed(self._seed)
            self._tile = torch.randn(TILE, generator=generator) * STD
        return self._tile

    def _scheme(self, module: str) -> WeightScheme | None:
        """The scheme of a module that stays quantized in memory; None for a dense one."""
        quantization = self._quantization
        if quantization is None or quantization.is_ignored(module):
            return None
        group = quantization.group_of(module, class_of(module))
        if group is None or not stays_quantized(group.scheme):
            return None
        return replace(group.scheme, strategy="channel") if group.scheme.strategy == "tensor" else group.scheme

    def _quantized(self, name: str, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedWeight:
        rows, columns = shape
        generator = torch.Generator().manual_seed(self._hash(name))
        if scheme.type == "float":
            return self._float8(scheme, shape, generator)
        four = scheme.num_bits == 4
        stored = (rows, columns // 2) if four else shape
        codes = torch.randint(0, 256, stored, generator=generator, dtype=torch.uint8)
        # Uniform codes of b bits have a deviation of 2^b / sqrt(12).
        spread = (1 << scheme.num_bits) / 12**0.5
        groups = (rows, scheme.num_groups(columns))
        scale = (torch.rand(groups, generator=generator) * 0.5 + 0.75) * (1.5 * STD / spread)
        scale = scale.to(self._dtype)
        middle = 8 if four else 0
        offset = None if scheme.symmetric and not four else scale * -middle
        return QuantizedWeight(scheme, shape, codes if four else codes.view(torch.int8), scale, offset)

    def _float8(self, scheme: WeightScheme, shape: tuple[int, int], generator: torch.Generator) -> QuantizedWeight:
        spread = 100  # a normal distribution then stays within E4M3's 448
        codes = (torch.randn(shape, generator=generator) * spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = (torch.rand((shape[0], 1), generator=generator) * 0.5 + 0.75) * (STD / spread)
        return QuantizedWeight(scheme, shape, codes, scale.to(self._dtype))

    def _shape(self, name: str, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        if shape is not None:
            return tuple(shape)
        known = self._shapes()
        if name not in known:
            raise self._missing(name)
        return known[name]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        if self._known is None:
            self._known = architecture_shapes(self.config, self.path)
        return self._known


def architecture_shapes(config: dict[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that a causal model of this config has, from transformers, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    try:
        typed = AutoConfig.for_model(**plain)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(typed)
    except Exception as error:  # the classes of transformers check their fields with exceptions of their own
        raise CheckpointError(f"{path}: transformers cannot build {config.get('architectures')} ({error})") from error
    tied = {"lm_head.weight"} if typed.tie_word_embeddings else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
