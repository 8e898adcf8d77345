"""Servers are started with a key that nobody sees, watched, and ended with all that they started, whatever dies."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import fake_sglang
import pytest

from moerl.errors import ConfigError, RolloutError
from moerl.rollout.sglang import servers as servers_module
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.processes import free_port, is_free, tail
from moerl.rollout.sglang.servers import SglangServers, attach, core_lists, server_environment, server_python

WAIT_SECONDS = 60.0


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def make(tmp_path, model):
    """A factory of servers that are ended after the test."""
    python, made = fake_sglang.make_python(tmp_path), []

    def build(**fields):
        config = SglangServerConfig(**({"python": str(python), "stop_seconds": 2.0} | fields))
        servers = SglangServers(config, model_path=model, log_folder=tmp_path, returns_routes=False, has_cuda=False)
        made.append(servers)
        return servers

    yield build
    for servers in made:
        servers.stop()


def wait_for(condition):
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def all_gone(folder):
    wait_for(lambda: not any(fake_sglang.is_alive(pid) for pid in fake_sglang.pids(folder)))


def test_a_server_comes_up_and_nothing_of_it_is_left(make, tmp_path):
    servers = make()
    servers.start()
    assert servers.dead() == {}
    assert all(fake_sglang.is_alive(pid) for pid in fake_sglang.pids(tmp_path))
    servers.stop()
    all_gone(tmp_path)
    assert servers.dead() == {}, "one that was stopped is not one that died"
    servers.stop()


def test_the_key_is_in_no_log_no_process_list_no_file_and_no_text(make, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    servers = make()
    key = servers.servers[0].admin_key
    assert len(key) > 30
    servers.start()
    seen = fake_sglang.command_lines()
    assert "--config" in seen
    assert key not in seen
    log = servers.servers[0].log_path.read_text()
    assert log.count("<key>") == 2, "the program prints both keys, as SGLang does"
    assert key not in log
    config_file = next(word for word in log.split("'") if word.endswith("keys.yaml"))
    wait_for(lambda: not os.path.exists(config_file))  # noqa: PTH110
    assert key not in repr(servers.servers) + caplog.text + " ".join(servers.command(0))


def test_keys_differ_from_run_to_run(make):
    keys = {make().servers[0].admin_key for _ in range(2)}
    assert len(keys) == 2
    assert all(len(key) == 64 and key.isalnum() for key in keys), "with a dash in front it would be an option"


def test_one_that_fails_says_why(make, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG", "fail")
    servers = make()
    with pytest.raises(RolloutError, match="ended with status 1 while it started") as caught:
        servers.start()
    assert "no such model" in str(caught.value)
    assert str(servers.servers[0].log_path) in str(caught.value)
    assert servers.servers[0].admin_key not in str(caught.value)
    all_gone(tmp_path)


def test_one_that_never_is_healthy_is_ended(make, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG", "never")
    servers = make(start_seconds=3.0)
    with pytest.raises(RolloutError, match=r"was not healthy after 3 s \(rollout.engine.servers.start_seconds\)"):
        servers.start()
    all_gone(tmp_path)


def test_one_that_ignores_the_request_to_end_is_killed(make, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SGLANG", "stubborn")
    servers = make(stop_seconds=0.5)
    servers.start()
    servers.stop()
    all_gone(tmp_path)


def test_death_is_seen_and_a_restart_takes_the_same_address(make, tmp_path):
    servers = make()
    servers.start()
    first = fake_sglang.pids(tmp_path)
    os.kill(first[0], signal.SIGKILL)
    wait_for(servers.dead)
    assert "was ended by signal 9" in servers.dead()[0]
    all_gone(tmp_path)
    url = servers.servers[0].url
    servers.restart(0)
    assert servers.dead() == {}
    assert servers.servers[0].url == url
    assert fake_sglang.pids(tmp_path)[0] != first[0]


def test_a_server_whose_scheduler_died_is_ended_at_once(make, tmp_path):
    """SGLang would write diagnostics for a minute (pitfall 25)."""
    servers = make()
    servers.start()
    urllib.request.urlopen(servers.servers[0].url + "/crash").read()
    wait_for(servers.dead)
    all_gone(tmp_path)


def test_the_keeper_dies_and_its_server_with_it(make, tmp_path):
    servers = make()
    servers.start()
    server = fake_sglang.pids(tmp_path)[0]
    with open(f"/proc/{server}/stat") as file:  # noqa: PTH123
        keeper = int(file.read().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not fake_sglang.is_alive(server))
    wait_for(servers.dead)
    os.kill(fake_sglang.pids(tmp_path)[1], signal.SIGKILL)  # one that left its group and lost its reaper


TRAINER = """
import sys, time
from pathlib import Path
from moerl.rollout.sglang.arguments import SglangServerConfig
from moerl.rollout.sglang.servers import SglangServers
python, model, folder, start_seconds = sys.argv[1:]
config = SglangServerConfig(python=python, stop_seconds=1.0, start_seconds=float(start_seconds))
servers = SglangServers(config, model_path=Path(model), log_folder=Path(folder), returns_routes=False, has_cuda=False)
servers.start()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def trainer(tmp_path, model, monkeypatch):
    def begin(mode=""):
        monkeypatch.setenv("FAKE_SGLANG", mode)
        python = fake_sglang.make_python(tmp_path)
        command = [sys.executable, "-c", TRAINER, str(python), str(model), str(tmp_path), "600"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    return begin


def test_a_trainer_that_is_killed_leaves_no_server(trainer, tmp_path):
    process = trainer()
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.wait()
    process.stdout.close()
    all_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_ends_while_servers_start_leaves_none(trainer, tmp_path, number):
    process = trainer("never")
    wait_for(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    process.send_signal(number)
    assert process.wait() != 0
    process.stdout.close()
    all_gone(tmp_path)


def test_closing_while_servers_start_ends_the_start(make, tmp_path, monkeypatch):
    """The thread that waits for health would go on for `start_seconds`, and the process with it."""
    monkeypatch.setenv("FAKE_SGLANG", "never")
    servers, raised = make(start_seconds=900.0), []

    def start():
        try:
            servers.start()
        except RolloutError as error:
            raised.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    wait_for(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    servers.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert raised == ["the servers were closed; nothing is started any more"]
    all_gone(tmp_path)


def test_closed_servers_are_not_started_again(make, tmp_path):
    servers = make()
    servers.start()
    first = fake_sglang.pids(tmp_path)
    servers.close()
    for call in (servers.start, lambda: servers.restart(0)):
        with pytest.raises(RolloutError, match="the servers were closed"):
            call()
    assert fake_sglang.pids(tmp_path) == first
    all_gone(tmp_path)


def test_a_port_that_another_took_is_named(make, monkeypatch):
    monkeypatch.setattr(servers_module, "PORT_SECONDS", 0.3)
    servers = make()
    port = int(servers.servers[0].url.rpartition(":")[2])
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(RolloutError, match=f"port {port} of 127.0.0.1 is taken"):
            servers.start()


def test_the_end_of_a_log_leaves_out_what_hides_the_reason(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == "    nothing"
    noise = 'nanobind: leaked 64 types!\n - leaked type "x"\n - ... skipped remainder\n' * 30
    log.write_text("first\nValueError: the reason\n\n" + noise)
    assert tail(log, lines=1) == "    ValueError: the reason"


def test_ports_are_free_and_below_those_of_outgoing_connections():
    port = free_port("127.0.0.1")
    assert is_free("127.0.0.1", port)
    assert port < 32768
    with pytest.raises(RolloutError, match="is it an address of this machine"):
        free_port("192.0.2.1")


def test_several_servers_have_addresses_and_logs_of_their_own(make):
    servers = make(num_servers=3).servers
    assert len({server.url for server in servers}) == len({server.log_path for server in servers}) == 3
    assert len({server.admin_key for server in servers}) == 1
    assert [server.index for server in servers] == [0, 1, 2]


def test_what_is_absent_is_named(tmp_path, model):
    with pytest.raises(ConfigError, match="make the servers' environment with `make sglang`"):
        server_python(str(tmp_path / "no-python"))
    config = SglangServerConfig(python=sys.executable)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        SglangServers(config, model_path=tmp_path / "no", log_folder=tmp_path, returns_routes=False, has_cuda=False)


def test_faults_of_the_configuration_come_first(tmp_path, model):
    with pytest.raises(ConfigError, match="expert is 4, but must divide"):
        SglangServers(
            SglangServerConfig(tensor=2, expert=4), model_path=model, log_folder=tmp_path, returns_routes=False
        )


def test_the_environment_of_a_server(monkeypatch):
    foreign = {"PYTHONPATH", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SGLANG_RETURN_ORIGINAL_LOGPROB"}
    for name in foreign | {"SGLANG_SOMETHING"}:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    cuda = server_environment("cuda", 1)
    assert not foreign & set(cuda)
    assert cuda["SGLANG_SOMETHING"] == "x", "what tunes the library is the user's"
    assert cuda["CUDA_VISIBLE_DEVICES"] == "3"
    assert cuda["HF_HUB_OFFLINE"] == "1"
    assert cuda["SGLANG_OPT_HOPPER_BLOCK_FP8_BF16"] == "0", "with its cache an H100 refuses new weights"
    assert "SGLANG_USE_CPU_ENGINE" not in cuda, "nothing of the shim where CUDA is there"
    cpu = server_environment("cpu", 1)
    assert cpu["PYTHONPATH"] == str(servers_module.SHIM)
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"


def test_cores_are_shared_out():
    assert core_lists([0, 1, 2, 3], 2) == "0,1|2,3"
    assert core_lists([4, 5], 2) == "4|5"
    assert core_lists([4, 5, 6], 2) == "4|5"
    assert core_lists([7], 2) == "7|7"


def test_attached_servers():
    one, two = attach(["http://127.0.0.1:1/", "http://other:2"])
    assert (one.url, two.url) == ("http://127.0.0.1:1", "http://other:2")
    assert (one.index, two.index, one.admin_key, one.log_path) == (0, 1, None, None)


def test_attached_servers_with_a_key(tmp_path):
    path = tmp_path / "key"
    path.write_text("secret\n")
    path.chmod(0o600)
    (server,) = attach(["http://a:1"], key_file=path)
    assert server.admin_key == "secret"
    assert "secret" not in repr(server)


@pytest.mark.parametrize(
    ("urls", "text"),
    [
        ([], "rollout.engine.urls is empty"),
        (["127.0.0.1:1"], "has '127.0.0.1:1'; each must look like http://host:port"),
        (["http://a:1/v1"], "each must look like http://host:port"),
        (["http://user:word@a:1"], "each must look like http://host:port"),
        (["http://a:1", "http://a:1/"], "has 'http://a:1' twice"),
    ],
)
def test_urls_that_cannot_be(urls, text):
    with pytest.raises(ConfigError) as caught:
        attach(urls)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "words", "text"),
    [(0o644, "secret", "is open to others .mode 644.; chmod 600 it"), (0o600, "", "must hold one line, the key")],
)
def test_key_files_that_cannot_be(tmp_path, mode, words, text):
    path = tmp_path / "key"
    path.write_text(words)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=text):
        attach(["http://a:1"], key_file=path)
    with pytest.raises(ConfigError, match="cannot read"):
        attach(["http://a:1"], key_file=tmp_path / "absent")
