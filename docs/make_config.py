"""Writes docs/config.md from the config tree: `python docs/make_config.py`. A test holds the file up to date."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal

from qfleet.api import RESUMABLE
from qfleet.cli import ALIASES, SECTIONS, flag_of
from qfleet.config import Config, paths

PAGE = Path(__file__).with_name("config.md")

HEAD = """\
# Settings

<!-- Written by docs/make_config.py from qfleet/config.py: edit those, then run `python docs/make_config.py`. -->

Every setting, with its general default. The family of tasks and the recipe change some of them ([recipes.md](recipes.md)), a YAML file
overrides those, and a flag overrides everything; a run's `config.yaml` shows what was used.

The setting `learner.batch_size` is the flag `--learner.batch-size` (or `--learner.batch_size`), `learner: {batch_size: 64}` in YAML, and
`overrides={"learner.batch_size": 64}` in Python. `env.id` is the first argument of `train`.
"""


def kind(hint: Any) -> str:
    """A field's type in the words of the person who sets it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in (types.UnionType, typing.Union):
        return f"{kind(args[0])} or none"
    if origin is tuple:
        return f"{kind(args[0])}s"
    if origin is dict:
        return "k=v pairs"
    return {int: "whole number", float: "number", bool: "true, false", str: "text"}[hint]


def default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is None or value == "":
        return ""
    if value is dataclasses.MISSING:  # made by a factory: an empty dict
        return "none"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(path: str, field: dataclasses.Field[Any], hint: Any) -> str:
    alias = f" ({ALIASES[path]})" if path in ALIASES else ""
    cells = (f"`{path}`{alias}", kind(hint), default(field), field.metadata["help"])
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def render() -> str:
    """The whole page."""
    sections: dict[str, list[str]] = {name: [] for name in ("", *SECTIONS)}
    for path, field, hint in paths(Config):
        sections[path.rpartition(".")[0]].append(row(path, field, hint))
    parts = [HEAD]
    for name, rows in sections.items():
        title = f"`{name}.*`: {SECTIONS[name]}" if name else "The run"
        parts.append("\n".join([f"## {title}", "| setting | takes | default | |", "|---|---|---|---|", *rows]) + "\n")
    flags = ", ".join(f"`{flag_of(path)}`" for path in RESUMABLE)
    parts.append(f"## What a resume may change\n{flags}. Everything else would make it another run, and is refused.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
