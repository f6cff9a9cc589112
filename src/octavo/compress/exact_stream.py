"""The hidden states of the model as it came, beside those of the model as compressed so far.

What a layer should compute is its output on the inputs that it had before anything was compressed, and what it will be
given are the inputs that the compressed layers before it make. GPTQ can aim at the first with the second (Li et al.,
"GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025), if both are known. They are for half
of the calibration text: as GPTQ goes a part of that way only, the rest would change little and take as long again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from octavo.compress.walker import BlockWalker, Call
from octavo.compress.watching import Group, run_watched

SHARE = 2  # of so many sequences one


@dataclass
class ExactInputs:
    """Inputs [..., K] of groups in the model as it came, by their first layers, for the first `known` of a batch's
    `count` sequences."""

    inputs: dict[str, Tensor]
    known: int
    count: int

    def split(self, name: str, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of a group's inputs [..., K] to all sequences: those to the known ones, what they were, and the rest; each
        [tokens, K]. None where they are not inputs to the same tokens."""
        exact = self.inputs.pop(name, None)
        rows = inputs.reshape(-1, inputs.shape[-1])
        known, left = divmod(len(rows) * self.known, self.count)
        if exact is None or left or exact.shape[:-1].numel() != known:
            return None
        return rows[:known], exact.reshape(known, -1), rows[known:]


class ExactStream:
    """Goes through the blocks like a `BlockWalker`, which has just started on `batches`, but with the blocks' weights
    as they were read, and with the first half of each batch (of batches of one sequence, every second)."""

    def __init__(self, walker: BlockWalker, batches: Sequence[Tensor]) -> None:
        self._walker = walker
        self._hidden: list[Tensor] = []
        self._calls: list[list[Call]] = []
        self._parts: list[ExactInputs] = []
        before = 0
        for batch, hidden in zip(batches, walker.hidden, strict=True):
            after = before + len(batch)
            known = -(-after // SHARE) - -(-before // SHARE)
            before = after
            self._parts.append(ExactInputs({}, known, len(batch)))
            self._hidden.append(hidden[:known].clone())
            self._calls.append(walker.calls_of(batch[:known])[0] if known else [])

    def advance(self, index: int, batch: int, groups: Sequence[Group] = ()) -> ExactInputs | None:
        """Run block `index`, which nothing has compressed yet, on a batch; the inputs of each group in it, or None
        where the batch has no sequence for this.

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
    ) -> ExactInputs | None:
        """As `advance`, through `block` in place of block `index`; stops when it has the inputs, unless it is to go
        through the whole block, whose output then is the next one's input."""
        if not len(self._hidden[batch]):
            return None
        prefix, tokens = f"{self._walker.blocks.name(index)}.", self._hidden[batch].shape[:-1].numel()
        firsts = [next(iter(group)) for group in groups]
        inputs: dict[str, Tensor] = {}

        def note(name: str, given: Tensor) -> None:
            if given.shape[:-1].numel() == tokens:
                inputs[name] = given

        hidden = self._hidden[batch].to(self._walker.device, self._walker.dtype, non_blocking=True)
        output = run_watched(
            lambda: self._walker.run_on(index, self._calls[batch], hidden, block),
            {name: block.get_submodule(name.removeprefix(prefix)) for name in firsts},
            note,
            whole,
        )
        if output is not None:
            self._hidden[batch].copy_(output)
        return replace(self._parts[batch], inputs=inputs)
