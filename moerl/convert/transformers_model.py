"""The model of a place as transformers runs it, whatever form its weights have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from moerl.convert.places import Place
from moerl.models.disk import disk_tensors
from moerl.models.quantised import quantisation_of, without_quantisation


def transformers_model(place: Place, dtype: torch.dtype, allowed: Iterable[str] = ()) -> Any:
    """transformers' model, whole in memory, to evaluate; `allowed` as in `Place.open`.

    Quantised weights reach it dequantised: its own reader takes the size of a block from the number of scales, and so
    scales partial blocks wrongly (192 rows and 2 scales: 96) or refuses them (576 rows and 5 scales).

    Raises:
        CheckpointError: as `Place.open`, for weights that transformers does not read itself.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    if place.form == "huggingface" and quantisation_of(place.hf) is None:
        return transformers.AutoModelForCausalLM.from_pretrained(place.weights, dtype=dtype).eval()
    source, hf = place.open(allowed), without_quantisation(place.hf)
    tensors = {tensor.name: tensor.make(source.get) for tensor in disk_tensors(place.family, hf)}
    config = transformers.CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
    model_class = getattr(transformers, hf["architectures"][0])
    return model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
