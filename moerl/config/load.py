"""YAML files, `extends`, a preset and `key=value` overrides -> one typed `RunConfig`.

Order of precedence, weakest first: schema defaults, values of `algorithm.preset`, the YAML files (an extended file
below its extender), overrides. A plugin node merges while its `name` stays, and is replaced whole when it changes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moerl.config.overlay import ROOT, Kind, assigned, checked, fields_of, kind_at, overlaid, words_for
from moerl.config.schema import RunConfig
from moerl.errors import ConfigError

logger = logging.getLogger(__name__)

Values = dict[str, Any]

_BOOL_WORDS = {"run.resume": {True: "auto", False: "never"}, "telemetry.progress": {True: "auto", False: "off"}}
"""Words that YAML 1.1 reads as booleans (`off`, `no`, `true`) at the keys where they have a meaning."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, presets: Mapping[str, Mapping[str, Any]] | None = None
) -> RunConfig:
    """Read `path`, what it extends, the preset it names and `overrides` into a `RunConfig`.

    `presets` maps the name of a method to values of the `algorithm` section.

    Raises:
        ConfigError: a file that is missing, cyclic or not a mapping, an unknown key, a value of the wrong type, an
            unknown preset, or mandatory keys without a value (all of them); names the file or override it came from.
    """
    layers = [(checked(values, ROOT, "", source), source) for source, values in _read_layers(Path(path), ())]
    return _to_config(_all_merged(layers, overrides, presets or {}), str(path))


def config_from_dict(
    values: Mapping[str, Any],
    source: str = "configuration",
    overrides: Sequence[str] = (),
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunConfig:
    """A `RunConfig` from nested plain values over the schema's defaults, as strict as `load_config`.

    Without `presets`, `algorithm.preset` is a name and nothing more.
    """
    layers = [(checked(dict(values), ROOT, "", source), source)]
    return _to_config(_all_merged(layers, overrides, presets or {}), source)


def read_values(path: str | Path) -> Values:
    """The plain values of one resolved configuration file (`<run>/config.yaml`).

    Raises:
        ConfigError: the file is missing or not a mapping.
    """
    return _read_file(Path(path), ())


def as_dict(cfg: RunConfig) -> Values:
    """The whole configuration as plain nested values."""
    return dataclasses.asdict(cfg)


def resolved_yaml(cfg: RunConfig) -> str:
    """Every key with its final value; `load_config` reads it back to an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(as_dict(cfg))))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _read_layers(path: Path, trail: tuple[Path, ...]) -> list[tuple[str, Values]]:
    resolved = path.resolve()
    if resolved in trail:
        chain = " -> ".join(str(item.name) for item in (*trail[trail.index(resolved) :], resolved))
        raise ConfigError(f"{trail[-1]}: 'extends' goes in a circle ({chain}); remove one of them")
    values = _read_file(path, trail)
    bases = values.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(item, str) for item in bases):
        raise ConfigError(f"{path}: 'extends' is {bases!r}, but must be a file name or a list of file names")
    layers: list[tuple[str, Values]] = []
    for base in bases:
        layers += _read_layers(path.parent / base, (*trail, resolved))
    return [*layers, (str(path), values)]


def _read_file(path: Path, trail: tuple[Path, ...]) -> Values:
    if not path.is_file():
        wanted = f" (extended by {trail[-1]})" if trail else ""
        raise ConfigError(f"there is no configuration file {path}{wanted}{_near_files(path)}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (OSError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: must be a YAML mapping of sections such as 'run:' ({_first_line(error)})"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of sections such as 'run:', but is a {type(values).__name__}")
    return cast("Values", values)


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    names = [item.name for item in path.parent.glob("*.y*ml")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _parse_override(text: str) -> tuple[list[str], Any, str]:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r}: must be key=value, such as optim.lr=1e-5")
    source = f"override {text!r}"
    try:
        loaded = OmegaConf.create(f"value: {raw}") if raw.strip() else OmegaConf.create({"value": ""})
        value = cast("Values", OmegaConf.to_container(loaded, resolve=False))["value"]
    except (yaml.YAMLError, OmegaConfBaseException):
        value = raw
    path = key.strip().replace("[", ".").replace("]", "").split(".")
    kind = kind_at(".".join(path))
    if kind is not None and kind.annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = raw.strip()  # `run.name=12e5` is a name, not 1200000.0
    if path == ["extends"]:
        raise ConfigError(f"{source}: 'extends' belongs in a YAML file; name that file on the command line instead")
    return path, value, source


def _all_merged(
    layers: list[tuple[Values, str]], overrides: Sequence[str], presets: Mapping[str, Mapping[str, Any]]
) -> Values:
    """The preset below the layers; its name may come from any of them, so they are merged once to learn it."""
    for values, source in layers:
        _check_types(values, source)
    merged = _merge(layers, overrides, {})
    preset = _preset_values(merged, presets)
    if not preset:
        return merged
    merged = _merge(layers, overrides, preset)
    for place, (values, source) in enumerate(layers):
        written_for = (values.get("algorithm") or {}).get("preset")
        if written_for not in (None, merged["algorithm"]["preset"]):
            plain = {**values, "algorithm": {"preset": written_for}}
            without = _merge([*layers[:place], (plain, source), *layers[place + 1 :]], overrides, preset)
            _warn_of_other_preset(written_for, source, without["algorithm"], merged["algorithm"])
    return merged


def _warn_of_other_preset(written_for: str, source: str, without: Values, merged: Values) -> None:
    """A file's values of axes are over any preset, so they stay where another method is chosen on top of that file."""
    kept = [f"algorithm.{name}" for name, value in merged.items() if value != without[name]]
    if kept:
        logger.warning(
            "algorithm.preset=%s stands over %s, which is written for %s: %s stay as they are there; set them too, or "
            "begin from a file without them (tools/check_config.py shows what comes out)",
            merged["preset"],
            source,
            written_for,
            ", ".join(kept),
        )


def _merge(layers: list[tuple[Values, str]], overrides: Sequence[str], preset: Values) -> Values:
    """Every faulty override is told in one error, and leaves the values as they were for the next."""
    merged = _defaults()
    if preset:
        merged = overlaid(merged, {"algorithm": preset}, ROOT)
    for values, _ in layers:
        merged = overlaid(merged, values, ROOT)
    faults: list[str] = []
    for text in overrides:
        try:
            path, value, source = _parse_override(text)
            with_it = assigned(merged, path, value, ROOT, source)
            _check_types({path[0]: with_it[path[0]]}, source)
            merged = with_it
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return merged


@functools.cache
def _schema(section: type) -> DictConfig:
    """Omegaconf's tree of a section with its defaults: half the time of a load to make, and copied by every merge."""
    return OmegaConf.structured(section)


@functools.cache
def _defaults() -> Values:
    """The schema's defaults; shared, as overlays copy what they change."""
    return cast("Values", OmegaConf.to_container(_schema(RunConfig)))


def _preset_values(merged: Values, presets: Mapping[str, Mapping[str, Any]]) -> Values:
    name = merged["algorithm"]["preset"]
    if name is None or not presets:
        return {}
    if name not in presets:
        near = difflib.get_close_matches(str(name), presets, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"algorithm.preset: there is no preset {name!r}{hint} Known: {', '.join(sorted(presets))}")
    source = f"preset {name!r}"
    values = checked({"algorithm": dict(presets[name])}, ROOT, "", source)
    _check_types(values, source)
    return values["algorithm"]


def _check_types(values: Values, source: str) -> None:
    """Each value must convert to its field's type; done per layer, so that the message can name the file."""
    _spell_out_bools(values, "", source)
    elements = [(f"{path}.", section, item) for path, section, item in _list_elements(values, ROOT, "")]
    sections = [(f"{key}.", fields_of(RunConfig)[key].section, item) for key, item in values.items()]
    for places in (elements, sections):  # an element's fault, seen from its section, would have no path
        known = [(item, section, prefix) for prefix, section, item in places if section and isinstance(item, dict)]
        faults = [f"{source}: {fault}" for place in known for fault in _type_faults(*place)]
        if faults:
            raise ConfigError(*faults)


def _type_faults(values: Values, section: type, prefix: str) -> list[str]:
    """What is wrong with each value; omegaconf stops at the first, so the parts are looked at once it has."""
    try:
        OmegaConf.merge(_schema(section), values)
        return []
    except OmegaConfBaseException as error:
        path = prefix + (error.full_key or "")
        kind = kind_at(path)
        seen = _value_at(values, error.full_key or "")
        first = f"{path} is {seen!r}, but must be {words_for(kind.annotation) if kind else _first_line(error)}"
    if len(values) > 1:
        return [fault for key in values for fault in _type_faults({key: values[key]}, section, prefix)] or [first]
    ((key, item),) = values.items()
    inner = fields_of(section)[key].section
    parts = _type_faults(item, inner, f"{prefix}{key}.") if inner and isinstance(item, dict) else []
    return parts or [first]


def _list_elements(values: Values, kind: Kind, prefix: str) -> Iterator[tuple[str, type, Values]]:
    """(path, dataclass, values) of every element of a list of sections; omegaconf's errors lose their path in there."""
    known = fields_of(kind.section) if kind.section else {}
    for key, item in values.items():
        inner = known[key]
        if inner.section is None:
            continue
        if isinstance(item, list):
            yield from ((f"{prefix}{key}[{index}]", inner.section, element) for index, element in enumerate(item))
        elif isinstance(item, dict):
            yield from _list_elements(item, inner, f"{prefix}{key}.")


def _spell_out_bools(values: Any, path: str, source: str) -> None:
    """YAML reads `off` and `yes` as booleans; text fields get the word back where it has a meaning, or an error."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            _spell_out_bools(item, f"{path}[{index}]", source)
        return
    if not isinstance(values, dict):
        return
    for key, item in values.items():
        where = f"{path}.{key}" if path else str(key)
        kind = kind_at(where)
        if kind is None or kind.plugin is not None:
            continue
        if isinstance(item, bool) and kind.annotation in (str, str | None):
            if where not in _BOOL_WORDS:
                raise ConfigError(
                    f"{source}: {where} is {item!r} (YAML reads on, off, yes and no so), but must be text"
                )
            values[key] = _BOOL_WORDS[where][item]
        _spell_out_bools(item, where, source)


def _value_at(values: Any, path: str) -> Any:
    for part in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list) and part.isdigit():
            values = values[int(part)]
    return values


def _to_config(values: Values, source: str) -> RunConfig:
    _refuse_environment(values, "", source)
    try:
        tree = OmegaConf.merge(_schema(RunConfig), values)
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            raise ConfigError(
                f"{source}: no value for {', '.join(missing)}; set each in the YAML or as {missing[0]}=..."
            )
        return cast("RunConfig", OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{source}: {where}{_first_line(error)}") from error


def _refuse_environment(values: Any, path: str, source: str) -> None:
    if isinstance(values, dict):
        for key, item in values.items():
            _refuse_environment(item, f"{path}.{key}" if path else str(key), source)
    elif isinstance(values, list):
        for index, item in enumerate(values):
            _refuse_environment(item, f"{path}[{index}]", source)
    elif isinstance(values, str) and "${oc.env" in values and "\\${oc.env" not in values:
        raise ConfigError(
            f"{source}: {path} reads the environment ({values}); write the value, or pass {path}=... instead"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
