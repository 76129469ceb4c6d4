# SPDX-License-Identifier: Apache-2.0
"""Keys and values where they belong, bit for bit."""

import pytest
import torch

from trtllm_replayssm.runtime.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [4, 6, 64])
def test_tokens_are_written_to_their_slots_and_positions(device, dtype, head_dim):
    """A slice of a wider tensor, as queries, keys and values come from one product, NaNs and denormal numbers too."""
    kv_heads, tokens = 3, 5
    cache = KVCache(2, 4, kv_heads, 8, head_dim, dtype, device)
    bits = torch.randint(-(2**15), 2**15, (tokens, 9, head_dim * dtype.itemsize // 2), dtype=torch.int16)
    both = bits.view(dtype).to(device)[:, 3:]
    slots, positions = (torch.tensor(values, device=device) for values in ([2, 0, 4, 0, 2], [7, 0, 1, 1, 0]))
    cache.write(1, slots, positions, both)
    for index, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        for written, given in ((cache.keys, both[index, :kv_heads]), (cache.values, both[index, kv_heads:])):
            assert torch.equal(written[1, slot, :, position].view(torch.int16), given.view(torch.int16))
    assert cache.keys[0].eq(0).all() and cache.values[0].eq(0).all()
    assert cache.keys[1].ne(0).any(-1).sum() == cache.values[1].ne(0).any(-1).sum() == tokens * kv_heads
    cache.clear(0)
    assert cache.keys[1, 0].eq(0).all() and cache.values[1, 0].eq(0).all() and cache.keys[1, 2].ne(0).any()
