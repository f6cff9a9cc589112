"""Walking a decoder block by block, without tracing.

One call of the whole model, in which every block only records what it is called with and hands its input on, gives the
arguments of each block (masks, rotary tables, which may differ from layer to layer) and the inputs of the first. After
that each block is run on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compress.blocks import Blocks
from octavo.compress.memory import free_unused
from octavo.errors import UnsupportedModelError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # a block's arguments without the hidden states


@dataclass(frozen=True)
class Keep:
    """Where the blocks' inputs wait, and in which dtype (None: the one they are computed in).

    `twice`: whether there is room for those of the model as it came beside those of the compressed one.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    twice: bool = True


class BlockWalker:
    """Runs the blocks of `model` on batches of token ids; `hidden` holds each batch's input to the next block.

    The blocks run on `device`. The inputs wait as `keep` says, each in one place from the first block to the last.
    """

    def __init__(
        self, model: Any, blocks: Blocks, device: torch.device | str = "cpu", keep: Keep | None = None
    ) -> None:
        self.model, self.blocks, self.device = model, blocks, torch.device(device)
        self.keep = keep or Keep(self.device)
        self.calls: list[list[Call]] = []  # [batch][block]
        self.hidden: list[Tensor] = []
        self.groups: list[list[str]] = []  # linear layers of a block that read the same tensor, names within the block
        self._once = _Once()
        self._extras: tuple[Any, ...] | None = None  # what a block returns besides its output; None: no tuple
        self.dtype = torch.float32

    def start(self, batches: list[Tensor]) -> None:
        """Take the batches, each int64 [B, T]. Block 0 must be filled, for it is run once, on one sequence."""
        self._probe(batches[0][:1].to(self.device))
        places: Iterator[Tensor] | None = None
        for batch in batches:
            calls, first = self.calls_of(batch)
            self.calls.append(calls)
            self.dtype = first.dtype
            places = places or iter(self._places(first, batches))
            self.hidden.append(next(places).copy_(first))
        free_unused()

    def calls_of(self, batch: Tensor) -> tuple[list[Call], Tensor]:
        """What each block is called with for token ids [B, T], and the input of the first; while what lies before the
        blocks is filled, and when this has started."""
        recorder = _Recorder(self._extras)
        self._run_model(batch.to(self.device), recorder)
        return self._once.of(recorder.calls), recorder.first

    def _places(self, like: Tensor, batches: list[Tensor]) -> list[Tensor]:
        """Where the inputs of each batch will wait: on a CPU all in one buffer, for between buffers that stay, as much
        would be left by others that do not, of no use to the larger ones of a block."""
        sizes, width, dtype = [batch.numel() for batch in batches], like.shape[-1], self.keep.dtype or like.dtype
        pinned = self.device.type == "cuda" and self.keep.device.type == "cpu"
        together = [sum(sizes)] if self.device.type == "cpu" else sizes
        made = [torch.empty(n, width, dtype=dtype, device=self.keep.device, pin_memory=pinned) for n in together]
        rows = made[0].split(sizes) if len(made) == 1 else made
        return [place.view(*batch.shape, width) for place, batch in zip(rows, batches, strict=True)]

    def run(self, index: int, batch: int) -> Tensor:
        """Output of block `index` on the current input of a batch."""
        hidden = self.hidden[batch].to(self.device, self.dtype, non_blocking=True)
        return self.run_on(index, self.calls[batch], hidden)

    def run_on(self, index: int, calls: list[Call], hidden: Tensor, block: nn.Module | None = None) -> Tensor:
        """Output of block `index` (or `block` in its place) for `hidden`, called with what `calls` has for it."""
        args, kwargs = calls[index]
        output = (block or self.blocks.modules[index])(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def advance(self, index: int, batch: int) -> None:
        """Run block `index` on a batch; its output becomes the input of the next."""
        self.hidden[batch].copy_(self.run(index, batch))

    def finish(self) -> None:
        """Let go of the batches."""
        self.hidden, self.calls, self._once = [], [], _Once()

    def logits(self, hidden: Tensor) -> Tensor:
        """What the model makes of `hidden` [B, T, H] after its last block: [B, T, vocabulary]."""
        given = hidden if self._extras is None else (hidden, *self._extras)
        for block in self.blocks.modules:
            block.forward = lambda *args, **kwargs: given
        try:
            logits: Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        finally:
            for block in self.blocks.modules:
                del block.forward
        return logits

    def _probe(self, batch: Tensor) -> None:
        """Run block 0 for real: the form of its output, and which of its linear layers share an input."""
        seen: dict[int, tuple[Tensor, list[str]]] = {}
        hooks = []
        for name, module in self.blocks.modules[0].named_modules():
            if isinstance(module, nn.Linear):
                hooks.append(module.register_forward_pre_hook(_note_input(seen, name)))
        recorder = _Recorder(None, real=self.blocks.modules[0].forward)
        try:
            self._run_model(batch, recorder)
        finally:
            for hook in hooks:
                hook.remove()
        self.groups = [names for _, names in seen.values()]
        self._extras = recorder.extras

    @torch.no_grad()
    def _run_model(self, batch: Tensor, recorder: _Recorder) -> None:
        for index, block in enumerate(self.blocks.modules):
            block.forward = recorder.stub(index)
        try:
            self.model.base_model(input_ids=batch, use_cache=False)
        finally:
            for block in self.blocks.modules:
                del block.forward
        recorder.check(type(self.model).__name__, len(self.blocks.modules))


def _note_input(seen: dict[int, tuple[Tensor, list[str]]], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        # The tensor is kept until the probe ends, so that its id is not given to another one.
        seen.setdefault(id(args[0]), (args[0], []))[1].append(name)

    return hook


class _Once:
    """Keeps one copy of tensors that are equal: batches of one shape have the same masks and rotary tables, and a mask
    of 2,048 tokens in each of 64 batches would take a gigabyte."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def of(self, value: Any) -> Any:
        """`value` (tensors in lists, tuples and dicts) with tensors seen before in place of equal ones."""
        if isinstance(value, Tensor):
            known = self._known.setdefault((value.shape, value.dtype), [])
            for other in known:
                if other is value or torch.equal(other, value):
                    return other
            known.append(value)
            return value
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return value


class _Recorder:
    """Stands in for the blocks during one call of the model."""

    def __init__(self, extras: tuple[Any, ...] | None, real: Callable[..., Any] | None = None) -> None:
        self.extras = extras
        self.calls: list[Call] = []
        self.first: Tensor = torch.empty(0)
        self._real = real
        self._last: Tensor | None = None
        self._problem: str | None = None

    def stub(self, index: int) -> Callable[..., Any]:
        """A forward function for block `index`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                hidden, args = args[0], args[1:]
            else:
                hidden = kwargs.pop("hidden_states")
            self._look_for_shared_state(index, hidden, args, kwargs)
            self.calls.append((args, kwargs))
            if index == 0:
                self.first = hidden
                if self._real is not None:
                    output = self._real(hidden, *args, **kwargs)
                    self.extras = output[1:] if isinstance(output, tuple) else None
            self._last = hidden.view(hidden.shape)  # a new object, to be recognised
            return self._last if self.extras is None else (self._last, *self.extras)

        return forward

    def _look_for_shared_state(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == 0:
            return
        if hidden is not self._last:
            self._problem = self._problem or f"changes the hidden states between its layers (before layer {index})"
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(value is handed for value in given for handed in (*(self.extras or ()), self._last)):
            self._problem = (
                self._problem or f"hands results of one layer to another beside the hidden states (to layer {index})"
            )

    def check(self, name: str, blocks: int) -> None:
        """Raise UnsupportedModelError if the model is no plain chain of its blocks."""
        if self._problem is None and len(self.calls) != blocks:
            self._problem = f"called {len(self.calls)} of its {blocks} layers"
        if self._problem is not None:
            raise UnsupportedModelError(
                f"{name} {self._problem}; compression works layer by layer, so such models are not supported"
            )
