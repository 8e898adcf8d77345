"""Servers of other nodes that nothing could reach are refused before one of them is started."""

from __future__ import annotations

import json
from contextlib import ExitStack

import fake_sglang
import pytest

from moerl.build_servers import _engine_of, _far_servers, _refuse_unreached, servers_elsewhere
from moerl.configure import load
from moerl.errors import ConfigError
from moerl.rollout.sglang.servers import Among
from moerl.weight_sync.servers import first_address
from moerl.world import Alone

FAR = "http://192.0.2.1:30000"
"""An address that is kept for documents: no machine has it."""


def config(folder, transport="{name: disk}", **servers):
    python = str(fake_sglang.make_python(folder))
    engine = {"name": "sglang", "servers": {"python": python, "nodes": "all", **servers}}
    given = [f"rollout.engine={json.dumps(engine)}", f"weight_sync.transport={transport}", f"run.output_dir={folder}"]
    return load("configs/demo/gspo.yaml", given)


def test_only_servers_on_all_nodes_are_looked_for(tmp_path):
    cfg = config(tmp_path)
    assert _engine_of(cfg) is not None
    assert _engine_of(load("configs/demo/gspo.yaml", [])) is None
    first = {"name": "sglang", "servers": {"nodes": "first"}}
    assert (
        _engine_of(
            load("configs/demo/gspo.yaml", [f"rollout.engine={json.dumps(first)}", "weight_sync.transport=disk"])
        )
        is None
    )
    with ExitStack() as stack:
        assert servers_elsewhere(cfg, Alone(), stack) is None, "one process is on the first node"


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        ("{name: tensor}", "use distributed, or disk with a folder that every node sees"),
        ("{name: distributed}", "weight_sync.transport.address is 127.0.0.1, .* set it to node"),
    ],
)
def test_a_transport_that_reaches_one_machine_alone(tmp_path, transport, told):
    cfg = config(tmp_path, transport)
    with pytest.raises(ConfigError, match=told) as caught:
        _refuse_unreached(cfg, ["http://127.0.0.1:30000", FAR])
    assert FAR in str(caught.value)
    _refuse_unreached(cfg, ["http://127.0.0.1:30000"])


@pytest.mark.parametrize("transport", ["{name: disk}", "{name: distributed, address: node}"])
def test_transports_that_reach_others(tmp_path, transport):
    _refuse_unreached(config(tmp_path, transport), [FAR])


def test_servers_that_listen_for_their_own_node_alone(tmp_path):
    cfg = config(tmp_path)
    engine = _engine_of(cfg)
    with pytest.raises(ConfigError, match=r"host is 127.0.0.1, where nobody but this node \(192.0.2.7\) .* to node"):
        _far_servers(cfg, engine, Among("key", 1, "192.0.2.7"))
    (server,) = _far_servers(cfg, engine, Among("key", 1, "127.0.0.1")).servers
    assert server.index == 1, "several launchers on one machine"


def test_the_first_nodes_address_is_that_of_the_launcher(monkeypatch):
    assert first_address() == "127.0.0.1"
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")
    assert first_address() == "127.0.0.3"
