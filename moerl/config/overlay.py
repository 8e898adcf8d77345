"""Lays plain YAML values over one another along the schema: strict about keys, plugin nodes replaced whole."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.schema import RunConfig
from moerl.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """What the schema expects at one place of the tree."""

    annotation: Any
    """The field's type; None inside a plugin node, whose keys are its plugin's business."""
    plugin: str | None = None
    """What the node or list of nodes selects, such as `trust region`."""
    is_list: bool = False

    @property
    def section(self) -> type | None:
        """The dataclass to descend into, also for the elements of a list of them."""
        inner = typing.get_args(self.annotation)[0] if self.is_list and self.plugin is None else self.annotation
        return inner if dataclasses.is_dataclass(inner) and isinstance(inner, type) else None


ROOT = Kind(RunConfig)


@functools.cache
def fields_of(section: type) -> dict[str, Kind]:
    """Name -> kind of every field of a section, in the order of the schema."""
    hints = typing.get_type_hints(section)
    kinds = {}
    for item in dataclasses.fields(section):
        is_list = typing.get_origin(hints[item.name]) is list
        plugin = item.metadata.get("plugin") or item.metadata.get("plugins")
        kinds[item.name] = Kind(hints[item.name], plugin, is_list)
    return kinds


def kind_at(path: str) -> Kind | None:
    """The kind at a dotted path such as `data.train[0].weight`; None inside a plugin node or where there is none."""
    kind: Kind | None = ROOT
    for part in path.replace("[", ".").replace("]", "").split("."):
        if kind is None or part.isdigit():
            continue
        kind = fields_of(kind.section).get(part) if kind.section else None
    return kind


def words_for(annotation: Any) -> str:
    """A type in a user's words."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if annotation in names:
        return names[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if item is type(None) else words_for(item) for item in arguments)
    if origin is list:
        return f"a list, each element {words_for(arguments[0])}"
    return "a mapping"


def every_key(section: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema."""
    for name, kind in fields_of(section).items():
        yield prefix + name
        if kind.section and not kind.is_list:
            yield from every_key(kind.section, f"{prefix}{name}.")


def _unknown_key(section: type, key: object, prefix: str, source: str) -> ConfigError:
    known = list(fields_of(section))
    near = difflib.get_close_matches(str(key), known, n=1)
    elsewhere = [path for path in every_key() if path.rsplit(".", 1)[-1] == str(key) or path == str(key)]
    if near:
        hint = f"did you mean {prefix + near[0]!r}?"
    elif elsewhere:
        shortest = min(elsewhere, key=lambda path: path.count("."))
        hint = f"did you mean {shortest!r} (nested, or as an override)?"
    else:
        hint = "there is no such setting."
    return ConfigError(f"{source}: unknown key '{prefix}{key}'; {hint} Allowed here: {', '.join(known)}")


def checked(value: Any, kind: Kind, path: str, source: str) -> Any:
    """A copy of `value` with plugin names spelled out as nodes and every key known to the schema.

    Raises:
        ConfigError: every unknown key (with the nearest name) and every value where a mapping or list must be.
    """
    if kind.plugin is not None:
        return _checked_plugin(value, kind, path, source)
    if kind.section is None:
        return value
    if kind.is_list:
        if not isinstance(value, list):
            raise ConfigError(f"{source}: {path} is {value!r}, but must be {words_for(kind.annotation)}")
        element = Kind(kind.section)
        return [checked(item, element, f"{path}[{index}]", source) for index, item in enumerate(value)]
    if value is None:
        return {}
    if not isinstance(value, dict):
        known = ", ".join(fields_of(kind.section))
        raise ConfigError(f"{source}: {path} is {value!r}, but must be a mapping with keys among {known}")
    prefix = f"{path}." if path else ""
    known_fields = fields_of(kind.section)
    result, faults = {}, []
    for key, item in value.items():
        try:
            if key not in known_fields:
                raise _unknown_key(kind.section, key, prefix, source)
            result[key] = checked(item, known_fields[key], f"{prefix}{key}", source)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return result


def _checked_plugin(value: Any, kind: Kind, path: str, source: str) -> Any:
    if kind.is_list:
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigError(
                f"{source}: {path} is {value!r}, but must be a list of {kind.plugin} nodes, such as [{{name: ...}}]"
            )
        element = Kind(None, kind.plugin)
        nodes = [_checked_plugin(item, element, f"{path}[{index}]", source) for index, item in enumerate(value)]
        for index, node in enumerate(nodes):
            if "name" not in node:
                raise ConfigError(f"{source}: {path}[{index}] has no name; write {{name: <{kind.plugin}>, ...}}")
        return nodes
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and isinstance(value.get("name", ""), str):
        return {str(key): item for key, item in value.items()}
    raise ConfigError(
        f"{source}: {path} is {value!r}, but must be the name of a {kind.plugin} or a mapping {{name: ..., ...}}"
    )


def overlaid(base: Any, top: Any, kind: Kind) -> Any:
    """`top` over `base`: sections and plugin nodes of one name merge, everything else is replaced."""
    if not (isinstance(base, dict) and isinstance(top, dict)):
        return top
    if kind.plugin is not None:
        same = "name" not in top or top["name"] == base.get("name")
        return {**base, **top} if same else top
    if kind.section is None:
        return top
    known = fields_of(kind.section)
    merged = dict(base)
    for key, value in top.items():
        merged[key] = overlaid(base[key], value, known[key]) if key in base else value
    return merged


def assigned(tree: Any, path: list[str], value: Any, kind: Kind, source: str, done: str = "") -> Any:
    """A copy of `tree` with `value` laid over the place that `path` names; digits index into lists.

    Raises:
        ConfigError: a path that leads nowhere, with the nearest name.
    """
    if not path:
        return overlaid(tree, checked(value, kind, done, source), kind)
    part, rest = path[0], path[1:]
    if kind.is_list:
        return _assigned_in_list(tree, path, value, kind, source, done)
    where = f"{done}.{part}" if done else part
    if kind.plugin is not None:
        return _assigned_in_plugin(tree, path, value, source, where)
    if kind.section is None:
        raise ConfigError(
            f"{source}: {done} has no keys of its own ('{'.'.join(path)}'); it is {words_for(kind.annotation)}"
        )
    known = fields_of(kind.section)
    if part not in known:
        raise _unknown_key(kind.section, part, f"{done}." if done else "", source)
    return {**tree, part: assigned(tree.get(part), rest, value, known[part], source, where)}


def _assigned_in_list(tree: Any, path: list[str], value: Any, kind: Kind, source: str, done: str) -> Any:
    part, rest = path[0], path[1:]
    length = len(tree or [])
    if not part.isdigit() or int(part) >= length:
        raise ConfigError(f"{source}: {done} has {length} element(s), numbered from 0; '{part}' is none of them")
    element = Kind(None, kind.plugin) if kind.plugin else Kind(typing.get_args(kind.annotation)[0])
    copy = list(tree)
    copy[int(part)] = assigned(copy[int(part)], rest, value, element, source, f"{done}[{part}]")
    return copy


def _assigned_in_plugin(tree: Any, path: list[str], value: Any, source: str, where: str) -> Any:
    part, rest = path[0], path[1:]
    node: Mapping[str, Any] = tree or {}
    if not rest:
        if part == "name" and value != node.get("name"):
            return {"name": value}
        return {**node, part: value}
    inner = node.get(part)
    if not isinstance(inner, dict):
        raise ConfigError(f"{source}: {where} is {inner!r}, not a mapping; give the whole value instead")
    return {**node, part: _assigned_in_plugin(inner, rest, value, source, f"{where}.{rest[0]}")}
