"""The hidden states of the model as it came, beside those of the model as compressed so far.

What a layer should compute is its output on the inputs that it had before anything was compressed, and what it will be
given are the inputs that the compressed layers before it make. GPTQ can aim at the first with the second (Li et al.,
"GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025), if both are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from octavo.compress.walker import BlockWalker

Group = dict[str, nn.Linear]  # layers that read the same input, by full name; known by the first of them


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
        inputs: dict[str, Tensor] = {}
        handles = []
        for group in groups:
            first = next(iter(group))

            def note(module: nn.Module, args: tuple[Any, ...], first: str = first) -> None:
                if args[0].shape[:-1].numel() == self._hidden[batch].shape[:-1].numel():
                    inputs[first] = args[0]

            handles.append(group[first].register_forward_pre_hook(note))
        try:
            hidden = self._hidden[batch].to(self._walker.device, self._walker.dtype, non_blocking=True)
            output = self._walker.run_on(index, batch, hidden)
        finally:
            for handle in handles:
                handle.remove()
        self._hidden[batch].copy_(output)
        return inputs
