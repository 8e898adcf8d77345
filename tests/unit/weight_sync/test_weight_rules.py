from __future__ import annotations

from pathlib import Path

import pytest

from moerl.configure import load
from moerl.errors import ConfigError

BASE = Path(__file__).resolve().parents[3] / "configs" / "demo" / "base.yaml"
HERE, FAR = "http://127.0.0.1:30000", "http://10.0.0.7:30000"


def sglang(url):
    return f'rollout.engine={{name: sglang, urls: ["{url}"]}}'


@pytest.mark.parametrize(
    "settings",
    [
        (),
        (sglang(HERE), "weight_sync.transport=disk"),
        (sglang(FAR), "weight_sync.transport=disk", "weight_sync.precision=bf16"),
        (sglang(HERE), "weight_sync.transport={name: tensor, keep_copy: true}"),
        (sglang(HERE), "weight_sync.transport=distributed"),
        (sglang(FAR), "weight_sync.transport={name: distributed, address: 10.0.0.1}"),
    ],
)
def test_what_reaches_the_engine_is_taken(settings):
    load(BASE, ["run.name=x", *settings])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((sglang(HERE),), r"transport=in_process does not reach .*sglang, .*in other processes; set it to disk or"),
        (
            ("weight_sync.transport=disk",),
            r"disk does not reach .*trainer's own process; set it to in_process",
        ),
        (("weight_sync.precision=bf16",), r"precision=bf16 is for servers in other processes; .* leave it as_is"),
        (("weight_sync.precision=fp8",), r"weight_sync.precision.*fp8_block"),
        (
            (sglang(FAR), "weight_sync.transport=tensor"),
            r"tensor hands over this machine's memory, but http://10.0.0.7",
        ),
        (
            (sglang(FAR), "weight_sync.transport=distributed"),
            r"address is 127.0.0.1, which http://10.0.0.7:30000 cannot reach",
        ),
        (
            (sglang(HERE), "weight_sync.transport={name: distributed, backend: mpi}"),
            r"weight_sync.transport.*backend is 'mpi', but must be one of auto, gloo, nccl",
        ),
    ],
)
def test_what_cannot_reach_it_is_refused_with_the_way_out(settings, words):
    with pytest.raises(ConfigError, match=words):
        load(BASE, ["run.name=x", *settings])
