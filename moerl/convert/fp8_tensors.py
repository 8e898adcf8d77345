"""A folder with one FP8 scale for each weight and one for its inputs, measured on text by nvidia-modelopt.

modelopt runs transformers' model, whole in memory, and writes a folder of its own. Taken from that folder are only the
FP8 weights, held to the source one by one, and their scales; all else is written as in any other export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from moerl.convert.building import Built, Show
from moerl.convert.carrying import carried_out
from moerl.convert.exports import Export, plain_tensors, with_copies, write_folder
from moerl.convert.fp8_folders import fp8_names, plain_modules
from moerl.convert.imports import Options, record_of, refuse_same_folder
from moerl.convert.places import Place
from moerl.convert.precision import cast, keeps_dtype
from moerl.convert.transformers_model import LOCAL, transformers_model
from moerl.errors import CheckpointError, ConfigError
from moerl.models.disk import disk_tensors
from moerl.models.hf_export import copied_files, leftover, sweep
from moerl.models.hf_folder import HFFolder, WeightSource, read_config
from moerl.models.rules import Rule, shorten
from moerl.tensor_file import Described

SETTINGS_FILE = "hf_quant_config.json"
"""What some readers look at in place of config.json."""
MAX_TEXTS = 512
MAX_TOKENS = 2048
"""Of a text."""
_SCALES = (".weight_scale", ".input_scale")
_STEPS = 32.0
"""Largest step between neighbours of float8, in units of the scale."""


def calibration_tokens(path: Path, settings: Path) -> list[Tensor]:
    """Token ids of the texts in `path`, one a line, by the tokenizer in the folder `settings`.

    Raises:
        ConfigError: no such file, not UTF-8, nothing in it, or a text that the tokenizer has no tokens for.
        CheckpointError: no tokenizer that transformers loads without the folder's own code.
    """
    from transformers import AutoTokenizer

    if not path.is_file():
        raise ConfigError(f"--calibration is {path}, which is no file; name a file with one text a line")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:MAX_TEXTS]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--calibration is {path}, which is not UTF-8: byte {error.object[error.start]:#04x} at offset "
            f"{error.start} ({error.reason}); save it as UTF-8 text, one text a line"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings, **LOCAL)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{settings}: no tokenizer that can be loaded without running the folder's own code ({reason}), so no text "
            "can be measured; export with --dtype fp8-block, which needs none"
        ) from error
    tokens = [torch.tensor(_encoded(tokenizer, line, path)[:MAX_TOKENS]) for line in lines]
    tokens = [one for one in tokens if one.numel()]
    if not tokens:
        raise ConfigError(f"--calibration is {path}, which holds no text; it needs one text a line")
    return tokens


def _encoded(tokenizer: Any, line: str, path: Path) -> list[int]:
    try:
        return tokenizer(line)["input_ids"]
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library has no class of its own for text without a token
            raise
        raise ConfigError(
            f"--calibration is {path}, which has the text {line[:60]!r}: the model's tokenizer cannot encode it "
            f"({error}); give texts like those that the model will see, one a line, not JSON of them"
        ) from error


def export_fp8_tensors(
    place: Place, out: Path, options: Options, texts: Sequence[Tensor], *, show: Show | None = None
) -> Built | None:
    """Write the model of `place` as modelopt's FP8; `texts` are token ids [s] on which inputs are measured.

    Raises:
        ConfigError: modelopt is not installed, an existing target, or FP8 of experts that have no such layout.
        CheckpointError: what `Place.open` and `copied_files` refuse, or weights of modelopt's that are not those of the
            model.
    """
    modelopt_version = _require_modelopt()
    refuse_same_folder(place, out)
    copied_files(place.settings)
    if out.exists() and not options.overwrite:
        raise ConfigError(f"{out} exists and is left as it is; choose another target, or give --overwrite")
    rules = place.family.weight_rules(place.hf)
    linear, source, carried = fp8_names(rules), place.open(options.allowed), place.carried(options.allowed)
    copies = place.repeated(options.allowed)
    record_of(place, source, carried, options)  # whatever is damaged of it is told before the model runs
    others = carried_out(carried, rules, options.dtype, frozenset())
    held = {tensor.name: tensor for tensor in disk_tensors(place.family, place.hf)}
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    sweep(out.absolute(), "modelopt")
    with TemporaryDirectory(dir=out.absolute().parent, prefix=f"{leftover(out, 'modelopt').name}-") as made:
        _run_modelopt(place, Path(made), texts, options.allowed)
        theirs = HFFolder(made)
        quantised = _checked_names(theirs, rules, linear)
        stored: list[Described] = []
        for tensor in with_copies(plain_tensors(held.values(), source, options.dtype), copies):
            own = _own_names(tensor.name) if tensor.name in quantised else ()
            stored += [Described(name, theirs.dtype(name), theirs.shape(name)) for name in own] or [tensor]
        unmeasured = plain_modules(others.tensors, frozenset())

        def make(tensors: Sequence[Described]) -> Iterator[Tensor]:
            for described in tensors:
                name = copies.get(described.name, described.name)
                if name in quantised:
                    yield _held_to_source(name, theirs, source)
                elif name.endswith(_SCALES):
                    yield theirs.get(name)
                elif name in held:
                    yield cast(name, held[name].make(source.get), described.dtype)
                else:
                    yield cast(name, others.get(name), described.dtype)

        digest = hashlib.sha256(json.dumps([text.tolist() for text in texts]).encode()).hexdigest()
        export = Export(
            [*stored, *others.tensors],
            make,
            words=f"fp8-tensor by modelopt {modelopt_version} on {digest}",
            followers=frozenset(tensor.name for tensor in stored if tensor.name.endswith(_SCALES)),
            quantisation=_without(read_config(made)["quantization_config"], "ignore", unmeasured),
            more_files={SETTINGS_FILE: _settings_file(Path(made), unmeasured)},
        )
        return write_folder(place, out, options, export, (source, carried), show=show)


def _without(settings: dict[str, Any], field: str, modules: Sequence[str]) -> dict[str, Any]:
    """`settings` whose list of what is not quantised has `modules` too."""
    return {**settings, field: [*(settings.get(field) or ()), *modules]} if modules else dict(settings)


def _settings_file(made: Path, modules: Sequence[str]) -> bytes:
    content = json.loads((made / SETTINGS_FILE).read_text(encoding="utf-8"))
    content["quantization"] = _without(content["quantization"], "exclude_modules", modules)
    return json.dumps(content, indent=4).encode()


def _own_names(name: str) -> tuple[str, ...]:
    base = name.removesuffix(".weight")
    return (name, *(base + ending for ending in _SCALES))


def _require_modelopt() -> str:
    try:
        import modelopt
        import modelopt.torch.export
        import modelopt.torch.quantization
    except ImportError as error:
        raise ConfigError(
            f"--dtype fp8-tensor takes nvidia-modelopt, which cannot be imported ({error}); install it with "
            "pip install 'moerl[modelopt]', or export with --dtype fp8-block, which needs nothing"
        ) from error
    return str(modelopt.__version__)


def _run_modelopt(place: Place, folder: Path, texts: Sequence[Tensor], allowed: Sequence[str]) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model: Any = transformers_model(place, torch.bfloat16, allowed)
    model.set_experts_implementation("eager")  # so that each expert is a call of its own, which modelopt can measure

    def run(model: Any) -> None:
        for tokens in texts:
            model(tokens[None], use_cache=False)

    with torch.no_grad():
        model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, run)
        export_hf_checkpoint(model, export_dir=folder)


def _checked_names(theirs: HFFolder, rules: Sequence[Rule], linear: frozenset[str]) -> frozenset[str]:
    """Names of the FP8 weights, once every one of the model's linear layers is among them and nothing is unknown."""
    quantised = {name for name in theirs.names() if theirs.dtype(name) is torch.float8_e4m3fn}
    missing = sorted(linear - quantised)
    missing += sorted(name for weight in quantised for name in _own_names(weight) if name not in theirs.names())
    routers = {name for rule in rules if keeps_dtype(rule) for name in rule.hf_names}
    known = {name for rule in rules for name in rule.hf_names} | {n for w in quantised for n in _own_names(w)}
    wrong = sorted((theirs.names() - known) | (quantised & routers))
    if missing or wrong:
        what = f"lacks {shorten(missing)}" if missing else f"has {shorten(wrong)}, which are not to be there"
        raise CheckpointError(f"modelopt's folder {what}; this version does not know the model, use --dtype fp8-block")
    return frozenset(quantised)


def _held_to_source(name: str, theirs: HFFolder, source: WeightSource) -> Tensor:
    weight, scale = theirs.get(name), float(theirs.get(_own_names(name)[1]))
    plain = source.get(name).float()
    if weight.shape != plain.shape or not bool(((weight.float() * scale - plain).abs() <= _STEPS * scale).all()):
        raise CheckpointError(
            f"{name}: what modelopt made of it is another tensor; this version does not know the model, use --dtype "
            "fp8-block"
        )
    return weight
