"""KV memory of a load: what paging held, beside what one contiguous reservation a request would have locked."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import OctavoError


@dataclass(frozen=True)
class KVMemory:
    """At the moment of the load when most KV blocks were held; both counts are the most within half a second."""

    running: int
    blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int

    @property
    def paged_bytes(self) -> int:
        """Bytes of the blocks held: full ones, and the last, partly filled one of each request."""
        return self.blocks * self.block_size * self.bytes_per_token

    @property
    def contiguous_bytes(self) -> int:
        """One reservation of max_model_len tokens for each running request, as servers without paging make."""
        return self.running * self.max_model_len * self.bytes_per_token

    @property
    def ratio(self) -> float:
        return self.contiguous_bytes / self.paged_bytes


def kv_memory_at_peak(
    samples: list[dict[str, float]], num_blocks: int, block_size: int, bytes_per_token: int, max_model_len: int
) -> KVMemory:
    """From samples of `kv_cache_usage_perc` (a share of `num_blocks`) and `num_requests_running` taken during a load.

    OctavoError when no sample saw a request: then the load was too short to be watched.
    """
    busy = [s for s in samples if s["num_requests_running"] > 0 and s["kv_cache_usage_perc"] > 0]
    if not busy:
        raise OctavoError(f"none of {len(samples)} looks at /metrics saw a running request; make the load longer")
    top = max(busy, key=lambda s: s["kv_cache_usage_perc"])
    blocks = round(top["kv_cache_usage_perc"] * num_blocks)
    return KVMemory(int(top["num_requests_running"]), max(1, blocks), block_size, bytes_per_token, max_model_len)
