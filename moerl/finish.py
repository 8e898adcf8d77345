"""The end of a run: weights as a Hugging Face folder, summary.json, report.html, and the table a person sees."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from rich.console import RenderableType
from torch import Tensor

from moerl.analysis.report import write_report
from moerl.analysis.run_folder import METRICS_FILE, read_metrics
from moerl.config.schema import RunConfig
from moerl.convert.carrying import kept_names
from moerl.models.carried import (
    NOTHING_CARRIED,
    carried_record,
    missing_warning,
    open_carried,
)
from moerl.models.family import family_of
from moerl.models.hf_export import write_hf_folder
from moerl.models.hf_folder import read_config
from moerl.models.repeated import RECORD, repeated_in
from moerl.protocols import Policy
from moerl.telemetry.summary import build_summary, package_versions, summary_table, write_summary

logger = logging.getLogger(__name__)

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HF_FOLDER = "hf"


def export_folder(run: Path, step: int) -> Path:
    """Where the weights of `step` go as a Hugging Face folder, in the folder of a run."""
    return run / "exports" / f"step_{step:06d}"


def export_weights(cfg: RunConfig, out: Path, policy: Policy, *, is_leader: bool) -> None:
    """Write the policy's weights, and what `model.path` carries beside them, as a Hugging Face folder; every rank takes
    part in putting each weight together.

    Raises:
        CheckpointError: a weight is not finite in `checkpoint.export_dtype`, the disk refuses, or the files in
            `model.path` with carried tensors are no longer what they were.
    """
    if not is_leader:
        for _ in policy.export():
            pass
        return
    hf = read_config(cfg.model.path)
    family = family_of(hf, cfg.model.family)
    rules = family.weight_rules(hf)
    carried, copies, warning = NOTHING_CARRIED, {}, None
    kept = frozenset[str]()  # routers keep the type of a folder's; where all is random there is none
    if cfg.model.init == "weights":
        copies = repeated_in(Path(cfg.model.path), family, hf)
        carried = open_carried(Path(cfg.model.path), family, hf)
        warning = carried.age_warning() or missing_warning(carried, family, hf)
        kept = kept_names(rules, carried)
    if warning is not None:
        _warn_once(warning)
    plain = carried.plain()
    extra = ((name, plain.get(name)) for name in sorted(plain.names()))
    write_hf_folder(
        out,
        itertools.chain(_with_copies(policy.export(), copies), extra),
        cfg.model.path,
        dtype=EXPORT_DTYPES[cfg.checkpoint.export_dtype],
        kept_names=kept,
        record={"converted_from": str(cfg.model.path), RECORD: copies, **carried_record(carried, is_older=True)},
    )


def _with_copies(stream: Iterable[tuple[str, Tensor]], copies: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that `model.path` holds under a second name too comes under both (`copies`: that name -> its own)."""
    for name, tensor in stream:
        yield name, tensor
        for copy, original in copies.items():
            if original == name:
                yield copy, tensor


@functools.cache
def _warn_once(text: str) -> None:
    """Of all exports of a run."""
    logger.warning("%s", text)


def finish_run(
    cfg: RunConfig, folder: Path, policy: Policy, seconds: float, *, is_leader: bool = True
) -> RenderableType | None:
    """Write what a finished run leaves behind; returns the summary to print; None on ranks that do not lead."""
    if cfg.checkpoint.export_hf:
        export_weights(cfg, folder / HF_FOLDER, policy, is_leader=is_leader)
    if not is_leader:
        return None
    rows = read_metrics(folder / METRICS_FILE).rows
    summary = build_summary(rows, seed=cfg.run.seed, seconds=seconds, versions=package_versions(), folder=folder)
    write_summary(folder, summary)
    if cfg.telemetry.report:
        write_report(folder)
    return summary_table(summary)
