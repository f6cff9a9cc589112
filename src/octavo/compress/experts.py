"""Mixtures of experts with the projections of each expert as linear layers of their own.

transformers keeps all experts of a layer in two tensors, [E, 2 I, H] and [E, H, I]. Recipes, statistics and published
checkpoints know one linear layer a projection, so the modules are rebuilt that way, under the checkpoints' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Names:
    """What checkpoints call an expert's projections, and the mixture where transformers has another name for it."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    mixture: str | None = None


# Families whose experts compute down(act(gate(x)) * up(x)); tests compare each with transformers' own module.
FAMILIES = {"mixtral": Names("w1", "w3", "w2", "block_sparse_moe")} | dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe"), Names()
)


class Expert(nn.Module):
    """One expert: rows [T, H] -> [T, H]."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Any, names: Names) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self._names = (names.gate, names.up, names.down)
        for name, weight in zip(self._names, (gate, up, down), strict=True):
            self.add_module(name, _linear(weight))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self._modules[name] for name in self._names)
        assert gate is not None and up is not None and down is not None
        return down(self.activation(gate(x)) * up(x))  # type: ignore[no-any-return]

    @property
    def is_watched(self) -> bool:
        """Whether something looks at the inputs of its layers."""
        return any(module._forward_pre_hooks for module in self.children())


class SeparateExperts(nn.Module):
    """The experts of a layer, named by their number; called as transformers calls its own.

    With `calibrates_all`, an expert whose inputs are looked at gets all tokens, whichever were sent to it. What comes
    out stays what the routing says.
    """

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.calibrates_all = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows [T, H], the experts of each [T, K] and their weights [T, K] -> [T, H]."""
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.children()):
            assert isinstance(expert, Expert)
            rows, place = torch.where(top_k_index == number)
            if self.calibrates_all and expert.is_watched:
                outputs = expert(hidden_states)[rows]
            elif len(rows):
                outputs = expert(hidden_states[rows])
            else:
                continue
            total.index_add_(0, rows, (outputs * top_k_weights[rows, place, None]).to(total.dtype))
        return total


def separate_experts(model: Any) -> None:
    """Rebuild the experts of a model, empty or loaded, in place; those of families that are not known stay fused."""
    names = FAMILIES.get(model.config.get_text_config().model_type)
    if names is None:
        return
    for path in [path for path, module in model.named_modules() if is_fused(module)]:
        mixture_path, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(mixture_path), leaf, _separated(model.get_submodule(path), names))
        if names.mixture is not None:
            owner_path, _, present = mixture_path.rpartition(".")
            _rename(model.get_submodule(owner_path), present, names.mixture)


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in two tensors."""
    dimensions = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
    return dimensions == {"gate_up_proj": 3, "down_proj": 3}


def calibrate_all_experts(model: Any, wanted: bool) -> None:
    """Whether statistics of an expert's inputs are those of all tokens, or of those that are sent to it."""
    for module in model.modules():
        if isinstance(module, SeparateExperts):
            module.calibrates_all = wanted


def routers(model: Any) -> Iterator[str]:
    """Full names of what sends tokens to separate experts, or weighs the shared one: always dense.

    To readers of checkpoints they are linear layers, whatever they are here.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if isinstance(module, SeparateExperts):
            mixture = path.rpartition(".")[0]
            for name, sibling in modules[mixture].named_children():
                shape: tuple[int, ...] = getattr(sibling._parameters.get("weight"), "shape", ())
                if len(shape) == 2 and (shape[0] == 1 or type(sibling) is not nn.Linear):
                    yield f"{mixture}.{name}"


def by_expert(group: dict[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
    """Layers by full name, those of each expert apart: all experts of a layer at once would take many times the memory,
    and a scale that spans layers (NVFP4's) is to span those of one expert.
    """
    portions: dict[str, dict[str, nn.Linear]] = {}
    for name, module in group.items():
        found = re.match(r".*\.experts\.\d+\.", name)
        portions.setdefault(found[0] if found else "", {})[name] = module
    return list(portions.values())


def _separated(fused: Any, names: Names) -> SeparateExperts:
    pairs = zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True)
    return SeparateExperts([Expert(gate_up, down, fused.act_fn, names) for gate_up, down in pairs])


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)  # a view would keep all the experts alive
    return layer


def _rename(owner: nn.Module, present: str, wanted: str) -> None:
    """Give a child another name in its place; the code of `owner` still finds it under its old one."""
    children = list(owner._modules.items())
    owner._modules.clear()
    owner._modules.update({wanted if name == present else name: child for name, child in children})
    object.__setattr__(owner, present, owner._modules[wanted])
