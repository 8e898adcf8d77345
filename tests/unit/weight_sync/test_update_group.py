"""How the group of weight updates is made over NCCL, whose class only torch's CUDA builds have."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from moerl.errors import WeightSyncError
from moerl.weight_sync.update_group import BLOCKING_WAIT, Rendezvous, UpdateGroup


class StandIn:
    """In the place of ProcessGroupNCCL: what it was given, and what the environment said when it was made."""

    made = ()
    fails = False

    class Options:
        """Takes any attribute, as the real one takes `_timeout`."""

    def __init__(self, store, rank, size, options):
        StandIn.made = (*StandIn.made, (rank, size, options._timeout, os.environ.get(BLOCKING_WAIT)))
        if StandIn.fails:
            raise RuntimeError("no GPU here")


@pytest.fixture
def rendezvous(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(StandIn, "made", ())
    meeting = Rendezvous("127.0.0.1", 0, timeout_seconds=5)
    yield meeting
    meeting.call_off()


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_group_of_nccl_waits_in_the_caller_and_no_other_group_does(rendezvous, monkeypatch, before, fails):
    """Else torch's watchdog ends the learner's process when a server dies in a broadcast."""
    monkeypatch.setattr(StandIn, "fails", fails)
    if before is None:
        monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    else:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    options = {"name": "updates", "world_size": 3, "backend": "nccl", "timeout_seconds": 7}
    if fails:
        with pytest.raises(WeightSyncError, match="did not come together within 7 s"):
            UpdateGroup(rendezvous, **options)
    else:
        UpdateGroup(rendezvous, **options)
    assert StandIn.made == ((0, 3, timedelta(seconds=7), "1"),)
    assert os.environ.get(BLOCKING_WAIT) == before


def test_torch_reads_the_variable_by_this_name():
    """Its header is part of every build; a CPU build has no class of NCCL that could be asked."""
    from pathlib import Path

    import torch

    header = Path(torch.__path__[0]) / "include" / "torch" / "csrc" / "distributed" / "c10d" / "ProcessGroupNCCL.hpp"
    assert f'"{BLOCKING_WAIT}"' in header.read_text()
