"""What the tensor transport sends is opened by a process that is no relative of the sender's, as a server is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moerl.weight_sync.flat import laid_out, pack
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.tensor import TensorConfig, TensorSender, serialised

OPENS = """
import base64, pickle, sys
import torch, torch.multiprocessing
found = pickle.loads(base64.b64decode(sys.stdin.read()))
flat = found["flattened_tensor"]
for entry in found["metadata"]:
    held = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
    print(entry.name, entry.numel, held.reshape(-1).view(torch.uint8).numpy().tobytes().hex())
"""
WEIGHTS = [
    ("eighth", torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.float8_e4m3fn)),
    ("matrix", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("bias", torch.arange(5, dtype=torch.float32).to(torch.bfloat16)),
]


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("memory", ["of the sender", "of its own"])
def test_a_process_of_another_family_reads_the_same_bytes(tmp_path, memory):
    """Pitfall 24: torch's default sends a file descriptor, which only a relative can ask for; a server dies of it."""
    sender = TensorSender(TensorConfig(), SenderPlace(tmp_path / "weights", tmp_path))
    entries, tensors = laid_out(WEIGHTS)
    if memory == "of the sender":
        flat = sender._allocate(entries[-1].stop)
    else:
        flat = torch.empty(entries[-1].stop, dtype=torch.uint8)
    pack(entries, tensors, flat)
    before = torch.multiprocessing.get_sharing_strategy()
    text = serialised(entries, flat)
    assert torch.multiprocessing.get_sharing_strategy() == before, "the strategy is the whole process's"
    done = subprocess.run(
        [sys.executable, "-c", OPENS], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    sent = [f"{name} {tensor.nbytes} {raw(tensor).numpy().tobytes().hex()}" for name, tensor in WEIGHTS]
    assert sorted(done.stdout.splitlines()) == sorted(sent)
    sender.close()
