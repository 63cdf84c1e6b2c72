"""Preallocated key/value caches, one per request. Rolling back is setting `length`; nothing is copied or cleared."""

from __future__ import annotations

import torch


class KVCache:
    """k, v [layers, kv_heads, capacity, head_dim] float32. Rows below `length` are committed; rows above are scratch."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.k = torch.empty(layers, kv_heads, capacity, head_dim)
        self.v = torch.empty(layers, kv_heads, capacity, head_dim)
        self.capacity = capacity
        self.length = 0

    def put(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k, v [n, kv_heads, head_dim] behind the committed rows and returns views [kv_heads, length + n, head_dim].

        `length` stays: the caller advances it by the rows that it commits.
        """
        start, end = self.length, self.length + k.shape[0]
        keys, values = self.k[layer], self.v[layer]
        keys[:, start:end] = k.transpose(0, 1)
        values[:, start:end] = v.transpose(0, 1)
        return keys[:, :end], values[:, :end]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes and commits rows of all layers at once: k, v [n, layers, kv_heads, head_dim]."""
        start, end = self.length, self.length + k.shape[0]
        self.k[:, :, start:end] = k.permute(1, 2, 0, 3)
        self.v[:, :, start:end] = v.permute(1, 2, 0, 3)
        self.length = end


class KVPool:
    """Caches of one shape, handed out again after use, so that no request pays for fresh pages twice."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self._shape = (layers, kv_heads, head_dim, capacity)
        self._free: list[KVCache] = []

    def take(self) -> KVCache:
        """An empty cache."""
        return self._free.pop() if self._free else KVCache(*self._shape)

    def give(self, cache: KVCache) -> None:
        """Hands `cache` back."""
        cache.length = 0
        self._free.append(cache)
