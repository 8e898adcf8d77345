"""The SGLang servers of this node: launched in an environment of their own, waited for, watched, restarted, ended.
Those of a run's other nodes: `nodes.py`.

Trainer and servers share no Python: transformers and torch are other versions there. What runs is
`python -m sglang.launch_server` under a keeper (`keeper.py`), with a log file of its own in the run folder, on loopback
unless told otherwise, behind a key that is drawn for the run and known to nobody else: it is in no list of processes,
no log, no configuration and no error text. Every endpoint but health and metrics asks for it, `/server_info` too, which
would tell the key to whoever asks if only SGLang's admin key were set.
"""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from moerl.errors import ConfigError, RolloutError
from moerl.rollout.sglang.arguments import NODE, WHERE, SglangServerConfig, arguments, check, device_of
from moerl.rollout.sglang.processes import ServerProcess, free_port, is_free, tail

_LOG = logging.getLogger(__name__)

SHIM = Path(__file__).parent / "shim"
"""On the PYTHONPATH of CPU servers, and of nothing else."""
ENVIRONMENT = Path(__file__).resolve().parents[3] / ".venv-sglang"
"""What `make sglang` makes."""
KEY_BYTES = 32
PROBE_SECONDS = 30.0
"""`/health` answers after a second or more, and later on a busy machine."""
LOOK_SECONDS = 1.0
PROGRESS_SECONDS = 15.0
PORT_SECONDS = 10.0
"""For the port of a server that was killed to be free again."""
FOREIGN_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_USE_CPU_ENGINE"),
)
"""Of the trainer's Python and its launcher, which would mislead a server; and what would change its arithmetic: with
the first of the two logprobs leave the temperature out."""
FOREIGN_PREFIXES = ("TORCHELASTIC_",)


@dataclass(frozen=True, slots=True)
class Server:
    """Where to find one, and the key that it asks for."""

    url: str
    """`http://host:port`."""
    admin_key: str | None = field(repr=False)
    """None where an attached server has none."""
    index: int
    log_path: Path | None = None
    """None for one that moerl did not start."""


@dataclass(frozen=True, slots=True)
class Among:
    """What the servers of one node share with those of a run's other nodes."""

    key: str = field(repr=False)
    first_index: int = 0
    """Number of this node's first server among all of them."""
    address: str = "127.0.0.1"
    """Of this node, which `host: node` stands for."""


def new_key() -> str:
    """Of letters and digits: one with a dash in front is an option to a parser."""
    return secrets.token_hex(KEY_BYTES)


def has_nvidia() -> bool:
    """Whether this machine has an NVIDIA device; looks at the machine, imports nothing."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


class SglangServers:
    """The servers that one run starts on this node. Any thread may call, one at a time; `close` at any time."""

    def __init__(
        self,
        config: SglangServerConfig,
        *,
        model_path: Path,
        log_folder: Path,
        returns_routes: bool,
        weight_version: int = 0,
        has_cuda: bool | None = None,
        among: Among | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            config: of all of them.
            model_path: Hugging Face folder that they load.
            log_folder: of the run; `sglang-<index>.log` are written there.
            returns_routes: whether completions shall carry the experts of their tokens.
            weight_version: label of the folder's weights.
            has_cuda: None looks for a device.
            among: None: there is no other node, and a key is drawn.

        Raises:
            ConfigError: faults of `config`, all of them; no such Python, or no such folder.
        """
        cuda = has_nvidia() if has_cuda is None else has_cuda
        check(config, has_cuda=cuda, returns_routes=returns_routes)
        if not (model_path / "config.json").is_file():
            raise ConfigError(f"model.path: {model_path} has no config.json; it must be a Hugging Face folder")
        among = among or Among(new_key())
        if config.host == NODE:
            config = replace(config, host=among.address)
        self._config = config
        self._first = among.first_index
        self._model_path = model_path.absolute()
        self._returns_routes = returns_routes
        self._weight_version = weight_version
        self._device = device_of(config, has_cuda=cuda)
        self._python = server_python(config.python)
        ports: list[int] = []
        while len(ports) < config.num_servers:
            ports += [port] if (port := free_port(config.host)) not in ports else []
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.servers = tuple(
            Server(f"http://{host}:{port}", among.key, index, log_folder.absolute() / f"sglang-{index}.log")
            for index, port in enumerate(ports, self._first)
        )
        self._processes = [self._process(server) for server in self.servers]
        self._lock = threading.Lock()
        """Of everything that is done to a process, and of `_is_closed`."""
        self._is_closed = False

    @property
    def start_seconds(self) -> float:
        """How long one may take to start."""
        return self._config.start_seconds

    def command(self, index: int) -> list[str]:
        """What is run for server `index`; the key is not in it."""
        line = arguments(
            self._config,
            model_path=str(self._model_path),
            port=_address(self.servers[index - self._first])[1],
            index=index - self._first,
            device=self._device,
            returns_routes=self._returns_routes,
        )
        label = ["--weight-version", str(self._weight_version)]
        return [str(self._python), "-m", "sglang.launch_server", *line, *label]

    def start(self) -> None:
        """Start all and wait until every one of them is healthy; on any failure, Ctrl-C included, none is left.

        Raises:
            RolloutError: one ended, or was not healthy in `start_seconds`, and holds the end of its log; or they were
                closed meanwhile.
        """
        is_well = False
        try:
            for server in self.servers:
                self._launch(server.index)
            self._wait([server.index for server in self.servers])
            is_well = True
        finally:
            if not is_well:
                self.stop()

    def restart(self, index: int) -> None:
        """End server `index` if it still runs, start it anew at the same URL and wait for it.

        It serves the weights of the model's folder: send it the present ones before it gets a request.

        Raises:
            RolloutError: it did not come up, or they were closed; it is not running then.
        """
        is_well = False
        try:
            with self._lock:
                self._refuse_closed()
                self._processes[index - self._first].stop()
            self._launch(index)
            self._wait([index])
            is_well = True
        finally:
            if not is_well:
                with self._lock:
                    self._processes[index - self._first].stop()

    def dead(self) -> dict[int, str]:
        """Servers that have ended although nobody stopped them -> why, with the end of their log."""
        found = {}
        for server, process in zip(self.servers, self._processes, strict=True):
            with self._lock:
                status = process.status()
            if status is not None:
                found[server.index] = f"it {_ending(status)}; the end of {server.log_path}:\n{tail(process.log_path)}"
        return found

    def stop(self) -> None:
        """End all of them, with everything they started. A second call does nothing."""
        with self._lock:
            for process in self._processes:
                process.ask_to_stop()
            for process in self._processes:
                process.stop()

    def close(self) -> None:
        """End all of them for good: nothing is started any more, and a start that is under way in a thread fails."""
        self._is_closed = True  # before the lock: whoever holds it, or waits for it, starts nothing new
        self.stop()

    def _process(self, server: Server) -> ServerProcess:
        assert server.log_path is not None
        return ServerProcess(
            self.command(server.index),
            log_path=server.log_path,
            secret=server.admin_key or "",
            environment=server_environment(self._device, self._config.tensor * self._config.pipeline),
            grace_seconds=self._config.stop_seconds,
        )

    def _launch(self, index: int) -> None:
        server, process = self.servers[index - self._first], self._processes[index - self._first]
        host, port = _address(server)
        end = time.monotonic() + PORT_SECONDS
        while not is_free(host, port):
            if time.monotonic() > end:
                raise RolloutError(f"server {index}: port {port} of {host} is taken by another process; start again")
            time.sleep(0.2)
        _LOG.info("server %d starts on %s (%s); log: %s", index, host, self._device, server.log_path)
        with self._lock:
            self._refuse_closed()
            process.start()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise RolloutError("the servers were closed; nothing is started any more")

    def _wait(self, indices: Sequence[int]) -> None:
        """Until all of them are healthy."""
        start = time.monotonic()
        waiting, next_sign = set(indices), PROGRESS_SECONDS
        while waiting:
            for index in sorted(waiting):
                if self._is_ready(index, start):
                    waiting.discard(index)
            seconds = time.monotonic() - start
            if waiting and seconds >= next_sign:
                next_sign += PROGRESS_SECONDS
                _LOG.info("... %.0f s, servers still starting: %s", seconds, ", ".join(map(str, sorted(waiting))))
            if waiting:
                time.sleep(LOOK_SECONDS)

    def _is_ready(self, index: int, start: float) -> bool:
        server, process = self.servers[index - self._first], self._processes[index - self._first]
        seconds = time.monotonic() - start
        with self._lock:
            self._refuse_closed()
            status = process.status()
        if status is not None or seconds > self._config.start_seconds:
            why = (
                f"was not healthy after {self._config.start_seconds:g} s ({WHERE}.start_seconds)"
                if status is None
                else f"{_ending(status)} while it started"
            )
            raise RolloutError(
                f"server {index} at {server.url} {why}. The end of its log, {server.log_path}:\n"
                f"{tail(process.log_path)}"
            )
        if not is_healthy(server.url):
            return False
        with self._lock:
            self._refuse_closed()
            process.tell_ready()
        _LOG.info("server %d is ready after %.0f s", index, seconds)
        return True


def is_healthy(url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether the server's scheduler answers. Blocks for a second or more; needs no key; raises nothing."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def server_python(python: str) -> Path:
    """The Python of the servers' environment.

    Raises:
        ConfigError: there is none.
    """
    path = ENVIRONMENT / "bin/python" if python == "auto" else Path(python).expanduser().absolute()
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"{WHERE}.python is {python!r}, but {path} is no program; make the servers' environment with `make "
            "sglang`, or name the Python of another one that has sglang 0.5.23"
        )
    return path


def server_environment(device: str, num_ranks: int) -> dict[str, str]:
    """All variables of a server's process: this one's without what belongs to the trainer, and a CPU server's shim."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_VARIABLES and not name.startswith(FOREIGN_PREFIXES)
    }
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    kept["SGLANG_OPT_HOPPER_BLOCK_FP8_BF16"] = "0"  # a cache on H100 with which it refuses new weights
    if device != "cpu":
        return kept
    return kept | {
        "PYTHONPATH": str(SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        # What is compiled for expert parallelism takes a C++ compiler minutes, for a model that runs seconds.
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": core_lists(sorted(os.sched_getaffinity(0)), num_ranks),
    }


def core_lists(cores: Sequence[int], num_ranks: int) -> str:
    """Cores of each rank, as SGLang reads them: `0,1|2,3`. Where ranks outnumber cores they share them in turn."""
    share = len(cores) // num_ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
    return "|".join(
        ",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(num_ranks)
    )


def attach(urls: Sequence[str], *, key_file: Path | None = None) -> tuple[Server, ...]:
    """Servers that somebody else started.

    Args:
        urls: `http://host:port` of each.
        key_file: holds the key that they ask for, one line, readable by this user alone; None where they have none.

    Raises:
        ConfigError: no URL, the same one twice, one that is none; a key file that is absent, empty or open to others.
    """
    key = None if key_file is None else _read_key(key_file)
    faults = [] if urls else ["rollout.engine.urls is empty; name one server or more, or leave it out to launch some"]
    plain = [url.rstrip("/") for url in urls]
    for url in plain:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.username:
            faults.append(f"rollout.engine.urls has {url!r}; each must look like http://host:port")
    faults += [f"rollout.engine.urls has {url!r} twice" for url in sorted(set(plain)) if plain.count(url) > 1]
    if faults:
        raise ConfigError(*faults)
    return tuple(Server(url, key, index) for index, url in enumerate(plain))


def _read_key(path: Path) -> str:
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"rollout.engine.key_file: cannot read {path} ({error.strerror})") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"rollout.engine.key_file: {path} is open to others (mode {mode & 0o777:o}); chmod 600 it")
    if not text or len(text.split()) > 1:
        raise ConfigError(f"rollout.engine.key_file: {path} must hold one line, the key, and nothing else")
    return text


def _address(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return parts.hostname or "", parts.port or 0


def _ending(status: int) -> str:
    return f"was ended by signal {status - 128}" if status > 128 else f"ended with status {status}"
