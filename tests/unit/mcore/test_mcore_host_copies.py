"""What a checkpoint holds on the host while it is written."""

from __future__ import annotations

import torch

from moerl.shards import Shard


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, to code that asks."""

    is_cuda = True


def test_copies_are_whole_contiguous_and_in_memory_that_can_be_given_back(monkeypatch):
    """torch never gives pinned memory back to the system, so none is asked for."""
    from moerl.mcore import checkpoint

    asked, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (asked.append(kwargs), empty(*args, **kwargs))[1])
    data = torch.arange(24.0, dtype=torch.bfloat16).view(4, 6).t().as_subclass(OnGpu)
    (copy,) = checkpoint._to_host([Shard("weights/a", (12, 4), (6, 0), data)])
    assert (copy.name, copy.shape, copy.offset) == ("weights/a", (12, 4), (6, 0))
    assert copy.data.dtype == torch.bfloat16
    assert copy.data.is_contiguous()
    assert torch.equal(copy.data.as_subclass(torch.Tensor), data.as_subclass(torch.Tensor))
    assert copy.data.data_ptr() != data.data_ptr()
    assert len(asked) == 1
    assert not asked[0].get("pin_memory")
