"""A checksum of tensors that is computed where they lie, alike on every device.

For each tensor the sum of (2i + 1) w_i over its words w, modulo 2**64, in blocks that a multiplier joins. Sums of
integers are exact in any order; all factors are odd, so a change of any one word changes the sum.
"""

import torch
import xxhash

WORDS_AT_ONCE = 2**22
"""Bounds the copy as int64 to 32 MiB."""
MULTIPLIER = 6364136223846793005
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Digest:
    """`add` every tensor in the same order on both sides; it never waits for a GPU, `hexdigest` does."""

    def __init__(self) -> None:
        self._names, self._sums = list[str](), list[torch.Tensor]()
        self.nbytes = 0

    @torch.no_grad()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1)
        words = flat.view(WORDS[flat.element_size()])
        odd = 2 * torch.arange(min(len(words), WORDS_AT_ONCE), dtype=torch.int64, device=words.device) + 1
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for block in words.split(WORDS_AT_ONCE):
            total = total * MULTIPLIER + (block.to(torch.int64) * odd[: len(block)]).sum()
        self._names.append(f"{name} {tensor.dtype} {list(tensor.shape)}")
        self._sums.append(total)
        self.nbytes += flat.nbytes

    def hexdigest(self) -> str:
        return xxhash.xxh3_64(repr((self._names, [*map(int, self._sums)])).encode()).hexdigest()
