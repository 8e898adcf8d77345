"""What torchrun's environment says of a process."""

from __future__ import annotations

import pytest

from moerl.errors import ConfigError
from moerl.world import World, launched_world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_one_process_without_a_launcher():
    assert launched_world({}) == World() == World(0, 1, 0, 1, "")


def test_ranks_nodes_and_the_launch():
    launch = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    world = launched_world({**TORCHRUN, **launch})
    assert (world.rank, world.size, world.local_rank, world.num_nodes) == (3, 4, 1, 2)
    assert launched_world({**TORCHRUN, **launch, "RANK": "0"}).launch == world.launch
    for name in launch:
        assert launched_world({**TORCHRUN, **launch, name: "2"}).launch != world.launch, name


def test_half_an_environment_is_refused():
    with pytest.raises(ConfigError, match=r"RANK=None, LOCAL_RANK='x'.*WORLD_SIZE is set"):
        launched_world({"WORLD_SIZE": "2", "LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2"})
