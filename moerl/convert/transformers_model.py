"""The model of a place as transformers runs it, whatever form its weights have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moerl.convert.places import Place
from moerl.errors import CheckpointError
from moerl.models.disk import disk_tensors
from moerl.models.quantised import quantisation_of, without_quantisation

LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""How transformers reads every folder: no code of the folder is run, and nothing is fetched."""


def transformers_model(place: Place, dtype: torch.dtype, allowed: Iterable[str] = ()) -> Any:
    """transformers' model, whole in memory, to evaluate; `allowed` as in `Place.open`.

    Quantised weights reach it dequantised: its own reader takes the size of a block from the number of scales, and so
    scales partial blocks wrongly (192 rows and 2 scales: 96) or refuses them (576 rows and 5 scales).

    Code that comes with a folder (`auto_map`) is never run, and nothing is downloaded.

    Raises:
        CheckpointError: as `Place.open`, for weights that transformers does not read itself; or a model that this
            transformers cannot build without the folder's own code.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    if place.form == "huggingface" and quantisation_of(place.hf) is None:
        with _told(place):
            return transformers.AutoModelForCausalLM.from_pretrained(place.weights, dtype=dtype, **LOCAL).eval()
    source, hf = place.open(allowed), without_quantisation(place.hf)
    with _told(place):
        config = transformers.CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
        model_class = getattr(transformers, hf["architectures"][0])
    tensors = {tensor.name: tensor.make(source.get) for tensor in disk_tensors(place.family, hf)}
    with _told(place):
        return model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **LOCAL).eval()


@contextmanager
def _told(place: Place) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{place.path}: transformers cannot build model_type {place.hf.get('model_type')!r} ({reason}), and code "
            "that comes with a model is not run here; compare the tensors alone with verify --no-forward, or export "
            "with another --dtype than fp8-tensor"
        ) from error
