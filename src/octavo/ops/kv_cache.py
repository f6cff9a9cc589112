"""The paged KV cache of one layer, and what a step says about the requests that read and write it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU from calloc, so that gigabytes cost neither time nor memory until their blocks are used."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


@dataclass
class KVCache:
    """Keys and values of one layer in fixed-size blocks; block 0 is the null block.

    The order of the elements inside a block is a matter of the kernels and is told by `interleaved`:

    - plain:       k [blocks, Hkv, block_size, D],          v [blocks, Hkv, block_size, D]
    - interleaved: k [blocks, Hkv, D / 2, block_size, 2],   v [blocks, Hkv, block_size / 2, D, 2]

    The interleaved order puts the two factors of a bfloat16 pair product side by side: 16 keys (or 16 channels of two
    values) fill one vector register, so that neither product needs a sum across lanes. A block is contiguous in both.
    """

    k: Tensor
    v: Tensor
    interleaved: bool = False
    descriptor: Any = field(default=None, repr=False, compare=False)  # of a kernel that needs one, made on first use
    deterministic: bool = False  # attention over it gives a query the same bits in any step (`ops.paged_attention`)

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        interleaved: bool | None = None,
        deterministic: bool = False,
        shares_values: bool = False,
    ) -> KVCache:
        """A zeroed cache; `interleaved=None` takes the order that the fastest attention kernel here reads.

        With `shares_values` k and v are one tensor, in the plain order: values are columns of the keys.
        """
        if shares_values:
            rows = _zeros((num_blocks, num_kv_heads, block_size, head_dim), dtype, device)
            return cls(rows, rows, deterministic=deterministic)
        if interleaved is None:
            from octavo.ops.cpu import library  # the extension is opened on first use only

            interleaved = library.prefers_interleaved(torch.device(device), dtype, block_size, head_dim)
        if interleaved:
            k_shape: tuple[int, ...] = (num_blocks, num_kv_heads, head_dim // 2, block_size, 2)
            v_shape: tuple[int, ...] = (num_blocks, num_kv_heads, block_size // 2, head_dim, 2)
        else:
            k_shape = v_shape = (num_blocks, num_kv_heads, block_size, head_dim)
        k, v = _zeros(k_shape, dtype, device), _zeros(v_shape, dtype, device)
        return cls(k, v, interleaved, deterministic=deterministic)

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[3] if self.interleaved else self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, len(blocks) * block_size, D] of these blocks, in order."""
        k, v = self.k[blocks], self.v[blocks]
        if self.interleaved:
            k = k.permute(1, 0, 3, 2, 4)  # [Hkv, blocks, block_size, D / 2, 2]
            v = v.permute(1, 0, 2, 4, 3)  # [Hkv, blocks, block_size / 2, 2, D]
        else:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        shape = (self.num_kv_heads, -1, self.head_dim)
        return k.reshape(shape), v.reshape(shape)

    def scatter(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [T, Hkv, D] of token t to `slots[t]` = block * block_size + offset; a slot of -1 is skipped."""
        if slots.is_cuda:  # rows that pad a step have no slot; without a wait for the device they cannot be taken out
            is_real = (slots >= 0)[:, None, None]
            slots = slots.clamp(min=0)
            old_k, old_v = self._at(slots)
            k, v = torch.where(is_real, k, old_k.to(k.dtype)), torch.where(is_real, v, old_v.to(v.dtype))
        elif bool((slots < 0).any()):
            is_real = slots >= 0
            slots, k, v = slots[is_real], k[is_real], v[is_real]
        block, offset = slots // self.block_size, slots % self.block_size
        if self.interleaved:
            self.k[block, :, :, offset] = k.unflatten(2, (-1, 2)).to(self.dtype)
            self.v[block, :, offset // 2, :, offset % 2] = v.to(self.dtype)
        else:
            self.k[block, :, offset] = k.to(self.dtype)
            if self.v is not self.k:
                self.v[block, :, offset] = v.to(self.dtype)

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, Hkv, D] in these slots."""
        block, offset = slots // self.block_size, slots % self.block_size
        if self.interleaved:
            return self.k[block, :, :, offset].flatten(2), self.v[block, :, offset // 2, :, offset % 2]
        return self.k[block, :, offset], self.v[block, :, offset]


@dataclass
class AttentionMetadata:
    """Where the rows of a step belong; one a cache group. Requests come decodes first.

    query_start: int32 [S + 1], rows of q of request s are query_start[s]:query_start[s + 1].
    seq_lens: int32 [S], context length including the tokens of this step.
    block_table: int32 [S, max_blocks]; block 0 stands for what slid out of a window and is never read.
    slot_mapping: int64 [T], block * block_size + offset where the keys and values of token t go.
    num_decodes: how many leading requests have exactly one query row.
    query_lens_host, seq_lens_host: the lengths [S] as the host knows them, for kernels that are chosen by length; None
        where the caller has none (or where a CUDA graph will run with other lengths).
    counts: int32 [2], how many requests decode and how many there are, where a CUDA graph will run with other numbers
        of both; `num_decodes` is 0 then, and the last request is not one of them but has the rows that pad the step. A
        kernel that does not read it takes all requests as prompts, which gives the same. At most `max_prompts` are.
    num_shared: int32 [1], leading keys that all requests of a step of decodes have in the same blocks, for kernels that
        then read them once; it may be 0. None where it is not worth a kernel's time.
    key_rows: of a kernel that reads gathered keys, which makes it in the first layer.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    query_lens_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
    num_shared: Tensor | None = None
    counts: Tensor | None = None
    max_prompts: int = 0
    key_rows: Tensor | None = None

    def __post_init__(self) -> None:
        # Kernels read these by address, so a wrong type would be read as other numbers.
        tensors = (self.query_start, self.seq_lens, self.block_table)
        dtypes = (*(x.dtype for x in tensors), self.slot_mapping.dtype)
        if dtypes != (torch.int32, torch.int32, torch.int32, torch.int64):
            raise TypeError(f"query_start, seq_lens, block_table, slot_mapping must be int32 x 3, int64, not {dtypes}")
        table_is_dense = self.block_table.shape[1] <= 1 or self.block_table.stride(1) == 1
        if not (table_is_dense and all(x.is_contiguous() for x in (*tensors[:2], self.slot_mapping))):
            raise ValueError("the tensors of AttentionMetadata must be contiguous along their last dimension")
