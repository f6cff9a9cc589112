"""The hidden states of the model as it came, beside those of the model as compressed so far.

What a layer should compute is its output on the inputs that it had before anything was compressed, and what it will be
given are the inputs that the compressed layers before it make. GPTQ can aim at the first with the second (Li et al.,
"GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025), if both are known.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from octavo.compress.walker import BlockWalker
from octavo.compress.watching import Group, run_watched


class ExactStream:
    """Goes through the blocks like a `BlockWalker`, from where that is, but with their weights as they were read."""

    def __init__(self, walker: BlockWalker) -> None:
        self._walker = walker
        self._hidden = [hidden.clone() for hidden in walker.hidden]

    def advance(self, index: int, batch: int, groups: Sequence[Group] = ()) -> dict[str, Tensor]:
        """Run block `index`, which nothing has compressed yet, on a batch; the inputs [..., K] of each group in it.

        Inputs of fewer tokens (those sent to an expert) are left out: they are not those that the compressed model
        sends there.
        """
        return self.go_through(self._walker.blocks.modules[index], index, batch, groups, whole=True)

    def copy_of(self, index: int) -> nn.Module:
        """Block `index`, to be gone through when the block itself has changed."""
        config = self._walker.model.config
        shared = {id(part): part for part in (config, config.get_text_config())}
        return copy.deepcopy(self._walker.blocks.modules[index], shared)

    def go_through(
        self, block: nn.Module, index: int, batch: int, groups: Sequence[Group], whole: bool
    ) -> dict[str, Tensor]:
        """As `advance`, through `block` in place of block `index`; stops when it has the inputs, unless it is to go
        through the whole block, whose output then is the next one's input."""
        prefix, tokens = f"{self._walker.blocks.name(index)}.", self._hidden[batch].shape[:-1].numel()
        firsts = [next(iter(group)) for group in groups]
        inputs: dict[str, Tensor] = {}

        def note(name: str, given: Tensor) -> None:
            if given.shape[:-1].numel() == tokens:
                inputs[name] = given

        hidden = self._hidden[batch].to(self._walker.device, self._walker.dtype, non_blocking=True)
        output = run_watched(
            lambda: self._walker.run_on(index, batch, hidden, block),
            {name: block.get_submodule(name.removeprefix(prefix)) for name in firsts},
            note,
            whole,
        )
        if output is not None:
            self._hidden[batch].copy_(output)
        return inputs
