"""Servers of several nodes are started, started anew and ended where they are, at rank 0's word."""

from __future__ import annotations

import socket
import threading
import time

import fake_sglang
import pytest

from moerl.errors import RolloutError
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.nodes import FarNode, Fleet, NodeHost, node_address
from moerl.rollout.sglang.restarts import Restarts
from moerl.rollout.sglang.servers import Among, Server, SglangServers, new_key

WAIT_SECONDS = 60.0


class Texts:
    """A board inside one process; `fault` is raised by every look."""

    def __init__(self):
        self.texts = {}
        self.fault = None

    def put(self, key, text):
        self.texts[key] = text

    def look(self, key):
        if self.fault is not None:
            raise self.fault
        return self.texts.get(key)


class Nodes:
    """Two nodes with one server each, on this machine."""

    def __init__(self, folder, **fields):
        self.board, self.key, self.folders = Texts(), new_key(), [folder / "first", folder / "second"]
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.own, self.other = (self._servers(index, model, fields) for index in range(2))
        self.host = NodeHost(self.other, self.board, "run/1")
        far = tuple(Server(one.url, self.key, one.index) for one in self.other.servers)
        self.fleet = Fleet(self.own, [FarNode(self.board, "run/1", "node 1 (elsewhere)", far)])

    def _servers(self, index, model, fields):
        folder = self.folders[index]
        folder.mkdir()
        config = SglangServerConfig(python=str(fake_sglang.make_python(folder)), stop_seconds=2.0, **fields)
        among = Among(self.key, index)
        return SglangServers(
            config, model_path=model, log_folder=folder, returns_routes=False, has_cuda=False, among=among
        )

    def alive(self, index):
        return [pid for pid in fake_sglang.pids(self.folders[index]) if fake_sglang.is_alive(pid)]

    def close(self):
        self.fleet.close()
        self.host.close()


@pytest.fixture
def made(tmp_path):
    nodes = []

    def make(**fields):
        nodes.append(Nodes(tmp_path, **fields))
        return nodes[-1]

    yield make
    for one in nodes:
        one.board.fault = None
        one.close()


def wait_for(condition):
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_both_come_up_with_numbers_and_logs_of_their_own_behind_one_key(made):
    nodes = made()
    nodes.fleet.start()
    assert [one.index for one in nodes.fleet.servers] == [0, 1]
    assert nodes.alive(0)
    assert nodes.alive(1)
    assert len({one.url for one in nodes.fleet.servers}) == 2
    assert [one.log_path.name for one in (*nodes.own.servers, *nodes.other.servers)] == ["sglang-0.log", "sglang-1.log"]
    assert {one.admin_key for one in nodes.fleet.servers} == {nodes.key}
    assert nodes.key not in " ".join(nodes.board.texts.values()), "others can read the board"
    assert nodes.key not in repr(nodes.other.servers) + repr(Among(nodes.key))
    assert nodes.fleet.dead() == {}


def test_one_that_died_elsewhere_is_told_and_started_anew(made):
    nodes = made()
    nodes.fleet.start()
    fake_sglang.kill(nodes.folders[1])
    wait_for(lambda: 1 in nodes.fleet.dead())
    assert nodes.fleet.dead()[1].startswith("on node 1 (elsewhere): it was ended by signal 9; the end of ")
    restarts = Restarts(nodes.fleet, lambda: False)
    assert restarts._restart(1, False)
    assert nodes.alive(1)
    assert nodes.fleet.dead() == {}, "whoever waited for the start must not take it for dead"
    assert not restarts._restart(1, False)
    assert restarts.count == 1
    assert nodes.fleet.servers[1].url == nodes.other.servers[0].url


def test_one_of_this_node_is_started_anew_here(made):
    nodes = made()
    nodes.fleet.start()
    fake_sglang.kill(nodes.folders[0])
    wait_for(lambda: 0 in nodes.fleet.dead())
    nodes.fleet.restart(0)
    assert nodes.alive(0)
    assert len([key for key in nodes.board.texts if "/order/" in key]) == 1, "the other node heard of its start alone"


def test_a_start_that_fails_elsewhere_says_why_and_leaves_none(made, monkeypatch):
    nodes = made()
    monkeypatch.setattr(nodes.other._processes[0], "_environment", {"FAKE_SGLANG": "fail"})
    with pytest.raises(RolloutError, match=r"on node 1 \(elsewhere\): server 1 .* ended with status 1 .*") as caught:
        nodes.fleet.start()
    assert "no such model" in str(caught.value)
    assert str(nodes.other.servers[0].log_path) in str(caught.value)
    wait_for(lambda: not nodes.alive(0))
    monkeypatch.undo()
    nodes.fleet.start()
    assert nodes.alive(0)
    assert nodes.alive(1)


def test_a_failure_here_ends_the_other_nodes_too(made, monkeypatch):
    nodes = made()
    monkeypatch.setattr(nodes.own._processes[0], "_environment", {"FAKE_SGLANG": "fail"})
    with pytest.raises(RolloutError, match="server 0"):
        nodes.fleet.start()
    wait_for(lambda: "run/1/outcome/1" in nodes.board.texts)
    assert not nodes.alive(1)


def test_closing_ends_all_of_them_while_one_starts(made, monkeypatch):
    """Nobody waits for the end of a start that may take minutes."""
    monkeypatch.setenv("FAKE_SGLANG", "never")
    nodes = made()
    caught = []

    def start():
        try:
            nodes.fleet.start()
        except RolloutError as error:
            caught.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: all((folder / "pids").exists() for folder in nodes.folders))
    nodes.fleet.close()
    thread.join(WAIT_SECONDS)
    assert caught == ["the servers were closed; nothing is started any more"]
    wait_for(lambda: not nodes.alive(0) and not nodes.alive(1))


def test_whoever_waits_for_another_node_is_told_of_the_end(made, monkeypatch):
    nodes = made()
    monkeypatch.setattr(nodes.other._processes[0], "_environment", {"FAKE_SGLANG": "never"})
    nodes.own.start()
    caught = []

    def restart():
        try:
            nodes.fleet.restart(1)
        except RolloutError as error:
            caught.append(str(error))

    thread = threading.Thread(target=restart)
    thread.start()
    wait_for((nodes.folders[1] / "pids").exists)
    nodes.fleet.close()
    thread.join(WAIT_SECONDS)
    assert caught == ["the servers were closed; nothing is started any more"]


@pytest.mark.parametrize("end", ["stop", "close"])
def test_servers_of_this_node_end_though_the_others_cannot_be_told(made, monkeypatch, end):
    nodes = made()
    nodes.fleet.start()

    def put(key, text):
        raise RuntimeError("Connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(nodes.board, "put", put)
        with pytest.raises(RuntimeError, match="reset by peer"):
            getattr(nodes.fleet, end)()
    assert not nodes.alive(0)


def test_servers_end_where_the_board_is_gone(made, caplog):
    nodes = made()
    nodes.fleet.start()
    nodes.board.fault = RuntimeError("Connection reset by peer")
    wait_for(lambda: not nodes.alive(1))
    assert "the launcher's store does not answer (Connection reset by peer)" in caplog.text


def test_host_node_is_loopback_on_the_first_node_and_the_way_to_it_on_others(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    python = str(fake_sglang.make_python(tmp_path))

    def url(among):
        config = SglangServerConfig(python=python, host="node")
        servers = SglangServers(
            config, model_path=tmp_path, log_folder=tmp_path, returns_routes=False, has_cuda=False, among=among
        )
        assert servers.command(servers.servers[0].index)[6] == servers.servers[0].url.split("//")[1].rsplit(":", 1)[0]
        return servers.servers[0].url

    assert url(None).startswith("http://127.0.0.1:")
    assert url(Among("key", 3, "127.0.0.5")).startswith("http://127.0.0.5:")
    assert node_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(RolloutError, match=r"no way from this node to the run's first one, no-such-host.invalid"):
        node_address("no-such-host.invalid")


def test_the_way_to_another_machine_is_by_an_address_of_this_one():
    try:
        address = node_address("192.0.2.1")
    except RolloutError:
        pytest.skip("this machine has no network at all")
    with socket.socket() as probe:
        probe.bind((address, 0))
