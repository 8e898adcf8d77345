"""Composition of servers on several nodes (`rollout.engine.servers.nodes: all`). Part of `build.py`.

Rank 0 alone has an engine. The first process of every other node starts that node's servers when rank 0 says, and tells
it where they are; what they ask for as a key is drawn by rank 0 and reaches the other ranks as samples do.
"""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import ExitStack

from moerl.build_rollout import served_model
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError
from moerl.mcore.team import ProcessTeam
from moerl.mcore.wire import gather_json
from moerl.protocols import Team
from moerl.rollout.engine import engines
from moerl.rollout.sglang.arguments import WHERE
from moerl.rollout.sglang.engine_config import SglangEngineConfig, launched_here
from moerl.rollout.sglang.nodes import Elsewhere, FarNode, NodeHost, node_address
from moerl.rollout.sglang.servers import Among, Server, SglangServers, new_key
from moerl.weight_sync.servers import is_here, is_loopback
from moerl.weight_sync.transport import transports


def servers_elsewhere(cfg: RunConfig, team: Team, stack: ExitStack) -> Elsewhere | None:
    """On rank 0 the servers of all other nodes, None where they have none; every rank calls it. `stack` ends them.

    Raises:
        ConfigError: the servers of another node cannot be reached, or not by this transport.
        RolloutError: no way leads from this node to the first.
    """
    engine_cfg = _engine_of(cfg)
    if engine_cfg is None or not isinstance(team, ProcessTeam) or team.world.num_nodes == 1:
        return None
    world = team.world
    drawn = json.dumps([new_key(), secrets.token_hex(4)]).encode() if team.is_leader else None
    key, run = json.loads(team.spread(drawn))  # a launch may walk several runs, with one board
    node = world.rank // world.local_size
    place = None
    if world.local_rank == 0 and node:
        among = Among(key, node * int((engine_cfg.servers or {}).get("num_servers", 1)), node_address(world.head))
        servers = _far_servers(cfg, engine_cfg, among)
        stack.callback(NodeHost(servers, team.board(), f"{run}/{node}").close)
        place = {"host": socket.gethostname(), "urls": {server.index: server.url for server in servers.servers}}
    told = gather_json(place)[world.local_size :: world.local_size]
    if not team.is_leader:
        return None
    board, far = team.board(), []
    for number, found in enumerate(told, 1):
        servers = tuple(Server(url, key, int(index)) for index, url in found["urls"].items())
        far.append(FarNode(board, f"{run}/{number}", f"node {number} ({found['host']})", servers))
    _refuse_unreached(cfg, [server.url for one in far for server in one.servers])
    return Elsewhere(key, tuple(far))


def _engine_of(cfg: RunConfig) -> SglangEngineConfig | None:
    """Where servers are launched on all nodes."""
    _, engine_cfg = engines.resolve(cfg.rollout.engine, where="rollout.engine")
    if not isinstance(engine_cfg, SglangEngineConfig) or (engine_cfg.servers or {}).get("nodes") != "all":
        return None
    return engine_cfg


def _far_servers(cfg: RunConfig, engine_cfg: SglangEngineConfig, among: Among) -> SglangServers:
    """Of this node, which is not the first."""
    host = str((engine_cfg.servers or {}).get("host", "127.0.0.1"))
    if is_loopback(host) and not is_loopback(among.address):
        raise ConfigError(
            f"{WHERE}.nodes is all and {WHERE}.host is {host}, where nobody but this node ({among.address}) can reach "
            f"its servers: set {WHERE}.host to node"
        )
    return launched_here(engine_cfg, served_model(cfg), 0, among)


def _refuse_unreached(cfg: RunConfig, urls: list[str]) -> None:
    """Where weights could not come to servers of other nodes; before one of them is started."""
    plugin, transport_cfg = transports.resolve(cfg.weight_sync.transport, where="weight_sync.transport")
    far = [url for url in urls if not is_here(url)]
    if far and plugin.name == "tensor":
        raise ConfigError(
            f"weight_sync.transport is tensor, which hands over this machine's memory, but {WHERE}.nodes is all and "
            f"{far[0]} is on another one: use distributed, or disk with a folder that every node sees"
        )
    if far and plugin.name == "distributed" and is_loopback(transport_cfg.address):
        raise ConfigError(
            f"weight_sync.transport.address is {transport_cfg.address}, which only this machine can reach, but "
            f"{WHERE}.nodes is all and {far[0]} is on another one: set it to node, or to this machine's address as "
            "seen from there"
        )
