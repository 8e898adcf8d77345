"""Request ids and seeds: stable over processes and machines, and never shared by two samples."""

from __future__ import annotations

import numpy as np
import pytest

from moerl.rollout.engine import prompt_id_of, request_id, sample_seed

PINNED = 4386627648542415953
"""A change of this number changes every run's samples: say so in the changelog."""


def test_a_seed_is_pinned_so_no_process_or_machine_has_another():
    assert sample_seed(0, 3, "sum/17", 5) == PINNED


def test_every_argument_changes_the_seed_and_none_runs_into_the_next():
    seeds = {sample_seed(r, s, p, i) for r in (0, 1) for s in (1, 11) for p in ("a", "a1", "1") for i in (1, 11, 111)}
    assert len(seeds) == 2 * 2 * 3 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_spread_evenly():
    seeds = np.array([sample_seed(0, s, f"d/{p}", i) for s in range(5) for p in range(40) for i in range(10)])
    counts = np.bincount((seeds >> 60).astype(np.int64), minlength=8)
    assert counts.sum() == 2000
    assert ((counts - 250) ** 2 / 250).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize("prompt_id", ["sum/0", "odd#name/3", "#", ""])
def test_a_request_id_gives_its_prompt_back(prompt_id):
    assert prompt_id_of(request_id(prompt_id, 12)) == prompt_id
