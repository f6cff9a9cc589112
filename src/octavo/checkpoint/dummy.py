"""Random weights from config.json alone (load_format="dummy"): for measuring speed without a download."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.quantization_config import QuantizationConfig, class_of
from octavo.checkpoint.quantized import QuantizedWeight, memory_scheme
from octavo.checkpoint.scheme import WeightScheme
from octavo.errors import CheckpointError

STD = 0.02
FLOAT8_STD = 100  # of the codes: a normal distribution then stays within E4M3's 448
TILE = 1_048_573  # a prime, so that rows of a repeated tile do not fall on each other
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DummyCheckpoint(Checkpoint):
    """Weights made up from the name, the shape and a seed; the same ones each time, on any device.

    The shape is what the caller asks for, or what transformers gives the architecture when nothing is asked. A million
    random numbers are drawn once; each tensor repeats them on `device` from a place of its own, which takes no longer
    than writing it.
    """

    def __init__(self, path: Path, seed: int = 0, device: torch.device | str = "cpu") -> None:
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
        self._device = torch.device(device)
        self._tiles: dict[str, Tensor] = {}
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
            return torch.full(shape, fill, dtype=self._dtype, device=self._device)
        return self._repeated("normal", name, shape)

    def weight(self, module: str, shape: tuple[int, ...] | None = None) -> Tensor | QuantizedWeight:
        name = f"{module}.weight"
        scheme = self._scheme(module)
        shape = self._shape(name, shape)
        if scheme is None or len(shape) != 2:
            return self.tensor(name, shape)
        return self._quantized(name, scheme, (shape[0], shape[1]))

    def stored_bits(self, module: str) -> int | None:
        scheme = self._stored_scheme(module)
        return None if scheme is None else scheme.num_bits

    def load_tokenizer(self) -> Any:
        if self.path.is_file():
            from octavo.checkpoint.gguf_checkpoint import GGUFCheckpoint

            return GGUFCheckpoint(self.path).load_tokenizer()
        from octavo.checkpoint.safetensors_checkpoint import load_directory_tokenizer

        return load_directory_tokenizer(self.path)

    def _hash(self, name: str) -> int:
        return zlib.crc32(f"{self._seed}:{name}".encode())

    def _repeated(self, kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tile of random numbers of this kind, from a place that depends on the name, over and over."""
        tile, count = self._tile(kind), math.prod(shape)
        start = self._hash(name) % TILE
        return torch.cat((tile[start:], tile[:start])).repeat(-(-count // TILE))[:count].view(shape)

    def _tile(self, kind: str) -> Tensor:
        """TILE numbers: "normal" with deviation STD, "scale" uniform in 0.75 to 1.25, "byte" of uniform bits, "float8"
        codes of a normal distribution (as bytes).
        """
        if kind not in self._tiles:
            generator = torch.Generator().manual_seed(self._seed)
            if kind == "byte":
                tile = torch.randint(0, 256, (TILE,), generator=generator, dtype=torch.uint8)
            elif kind == "scale":
                tile = torch.rand(TILE, generator=generator) * 0.5 + 0.75
            elif kind == "float8":
                normal = torch.randn(TILE, generator=generator) * FLOAT8_STD
                tile = normal.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            else:
                tile = (torch.randn(TILE, generator=generator) * STD).to(self._dtype)
            self._tiles[kind] = tile.to(self._device)
        return self._tiles[kind]

    def _scheme(self, module: str) -> WeightScheme | None:
        """The scheme of a module that stays quantized in memory; None for a dense one."""
        stored = self._stored_scheme(module)
        return None if stored is None else memory_scheme(stored)

    def _stored_scheme(self, module: str) -> WeightScheme | None:
        quantization = self._quantization
        if quantization is None or quantization.is_ignored(module):
            return None
        group = quantization.group_of(module, class_of(module))
        return None if group is None else group.scheme

    def _quantized(self, name: str, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedWeight:
        rows, columns = shape
        scale = self._repeated("scale", name, (rows, scheme.num_groups(columns)))
        if scheme.type == "float":
            codes = self._repeated("float8", name, shape).view(torch.float8_e4m3fn)
            return QuantizedWeight(scheme, shape, codes, (scale * (STD / FLOAT8_STD)).to(self._dtype))
        four = scheme.num_bits == 4
        codes = self._repeated("byte", name, (rows, columns // 2) if four else shape)
        # Uniform codes of b bits have a deviation of 2^b / sqrt(12).
        spread = (1 << scheme.num_bits) / 12**0.5
        scale = (scale * (1.5 * STD / spread)).to(self._dtype)
        middle = 8 if four else 0
        offset = None if scheme.symmetric and not four else scale * -middle
        return QuantizedWeight(scheme, shape, codes if four else codes.view(torch.int8), scale, offset)

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
