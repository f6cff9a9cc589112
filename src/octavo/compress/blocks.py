"""The decoder blocks of a transformers model: where they are, and whether they can be compressed one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from octavo.compress.experts import FAMILIES
from octavo.errors import UnsupportedModelError


@dataclass(frozen=True)
class Blocks:
    """`prefix` is the full name of the list ("model.layers"), `modules` its blocks in order."""

    prefix: str
    modules: list[nn.Module]

    def name(self, index: int) -> str:
        """Full name of a block."""
        return f"{self.prefix}.{index}"

    def linears(self, index: int) -> Iterator[tuple[str, nn.Linear]]:
        """Full names and modules of a block's linear layers."""
        for relative, module in self.modules[index].named_modules():
            if isinstance(module, nn.Linear):
                yield f"{self.name(index)}.{relative}", module


# Layers that read the same input in every model that has them side by side.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def siblings(names: Iterable[str]) -> list[list[str]]:
    """Layers, by full name, in groups that read the same input, as far as their names tell; the order is kept."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        kind = next((family[0] for family in _SIBLINGS if leaf in family), leaf)
        groups.setdefault(f"{parent}.{kind}", []).append(name)
    return list(groups.values())


def find_blocks(model: Any) -> Blocks:
    """The decoder blocks; UnsupportedModelError, with the reason, for a model that is no plain chain of blocks."""
    refuse_unless_chain(model.config, type(model).__name__)
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and len(module) > 0
    ]
    marked = [(name, module) for name, module in lists if {type(block).__name__ for block in module} & kinds]
    found = marked or lists
    if len(found) != 1:
        what = "no list" if not found else f"{len(found)} lists ({', '.join(name for name, _ in found)})"
        raise UnsupportedModelError(
            f"{type(model).__name__}: {what} of {count} decoder blocks found, where there must be exactly one; "
            "models with a single decoder stack are supported"
        )
    name, modules = found[0]
    blocks = Blocks(name, list(modules))
    _refuse_shared(model, blocks)
    _refuse_fused_experts(blocks)
    return blocks


def refuse_unless_chain(config: Any, name: str) -> None:
    """Refuse, from the config alone, models whose blocks depend on more than the block before."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder: its decoder blocks read the encoder's output as well, so they cannot be "
            "calibrated as one chain; decoder-only models are supported"
        )
    shared = getattr(config.get_text_config(), "num_kv_shared_layers", 0)
    if shared:
        raise UnsupportedModelError(
            f"{name}: its last {shared} layers use the keys and values of earlier ones (num_kv_shared_layers), so a "
            "block's output depends on more than the block before it; such models are not supported"
        )


def _refuse_shared(model: Any, blocks: Blocks) -> None:
    owner: dict[int, str] = {}
    for index, block in enumerate(blocks.modules):
        for name, parameter in block.named_parameters():
            full = f"{blocks.name(index)}.{name}"
            first = owner.setdefault(id(parameter), full)
            if first != full:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {full} is the same weight as {first}; what suits one layer would spoil "
                    "the other, so models with weights shared across layers are not supported"
                )


def _refuse_fused_experts(blocks: Blocks) -> None:
    for index, block in enumerate(blocks.modules):
        for name, parameter in block.named_parameters():
            if parameter.dim() == 3 and "expert" in name:
                raise UnsupportedModelError(
                    f"{blocks.name(index)}.{name} holds all experts in one tensor; mixtures of experts are compressed "
                    f"where model_type is one of {', '.join(sorted(FAMILIES))}"
                )
