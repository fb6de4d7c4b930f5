"""The documentation is true: snippets run, command lines parse, links, files and settings exist, generated pages are fresh."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml

from qfleet import cli, recipes
from qfleet.config import Config, flatten, override, paths

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "qfleet"
PAGES = sorted(DOCS.glob("*.md"))
SETTINGS = {path for path, _, _ in paths()}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Block(NamedTuple):
    info: str  # what stands behind the opening fence: "python runnable"
    body: str


FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """Inline code."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def runnable(page: Path) -> list[str]:
    return [b.body for b in blocks(page) if b.info == "python runnable"]


def test_there_is_something_to_check() -> None:
    assert {p.name for p in PAGES} >= {"design.md", "guide.md", "recipes.md", "config.md", "extending.md"}
    assert len(runnable(DOCS / "guide.md")) >= 5 and commands(DOCS / "guide.md")


# --- code ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """The runnable blocks of a page, one after the other in one process. `# file: NAME` makes a block a file of that name."""
    script = []
    for body in runnable(page):
        name = re.match(r"# file: (\S+)\n", body)
        if name:
            (tmp_path / name[1]).write_text(body)
        else:
            script.append(body)
    (tmp_path / "page.py").write_text("\n".join(script))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@each_page
def test_python_and_yaml_blocks_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.info.startswith("python"):
            compile(block.body, page.name, "exec")
        if block.info == "yaml":
            override(Config(), flatten(yaml.safe_load(block.body)))


def commands(page: Path) -> list[list[str]]:
    """Every `qfleet ...` in shell blocks and in inline code, as words; shell variables become 1."""
    lines = [line for block in blocks(page) if block.info == "bash" for line in block.body.splitlines()]
    found = re.findall(r"(?:^|\s)qfleet( [^;|&\n]*)", "\n".join(lines + spans(page)))
    return [shlex.split(re.sub(r"\$\w+", "1", words), comments=True) for words in found]


@each_page
def test_commands_parse_and_give_a_config(page: Path) -> None:
    for words in commands(page):
        if "--help" in words[1:]:
            with pytest.raises(SystemExit, match="0"):
                cli.parse(words)
            continue
        command = cli.parse(words)
        args = dict(command.args)
        if command.name == "train" and "env" in args:
            settings = args.pop("overrides")
            config = recipes.make(args.pop("recipe", "dqn"), args.pop("env"))
            override(config, {**args, **settings})


# --- names ---------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}; there is {sorted(anchors(file))}"


@each_page
def test_named_files_exist(page: Path) -> None:
    for span in spans(page):
        if re.fullmatch(r"(qfleet|tests|docs|examples|benchmarks)/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page.name} names {span}"


@each_page
def test_named_settings_and_flags_exist(page: Path) -> None:
    flags = {flag for make in cli.PARSERS.values() for flag in make()._option_string_actions}
    for span in spans(page):
        if re.fullmatch(rf"({'|'.join(cli.SECTIONS)})\.(?!py\b)\w+", span):
            assert span in SETTINGS, f"{page.name} names the setting {span}"
        for flag in re.findall(r"(?:^|\s)(--[a-z][\w.-]*)", span):
            if not span.startswith(("pip ", "tensorboard ", "mypy ", "torchrun ", "mpirun ", "python benchmarks/")):
                assert flag.replace("_", "-") in flags, f"{page.name} names the flag {flag}"


def test_every_recipe_and_family_is_described() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "recipes.md").read_text(), re.M)
    assert sorted(rows) == sorted([*recipes.NAMES, *recipes.FAMILIES])


# --- generated, and kept in step with the code -------------------------------------------------------------------------------


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_config", DOCS / "make_config.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_is_up_to_date() -> None:
    made = generator()
    assert made.PAGE.read_text() == made.render(), "run: python docs/make_config.py"
    assert all(f"| `{path}`" in made.render() for path in SETTINGS)


def layout() -> list[str]:
    """The entries of qfleet/ in the order of design.md's layout."""
    tree = next(b.body for b in blocks(DOCS / "design.md") if b.body.startswith("qfleet/\n"))
    return re.findall(r"^  (\S+)", tree, re.M)


def test_the_layout_is_that_of_the_package() -> None:
    there = {p.name + "/" * p.is_dir() for p in PACKAGE.iterdir() if p.name not in ("__pycache__", "__main__.py")}
    assert set(layout()) == {name for name in there if name.endswith((".py", "/"))}


def imported(tree: ast.AST) -> set[str]:
    """Names right below qfleet that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("qfleet.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "qfleet":
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qfleet."):
            names.add(str(node.module).split(".")[1])
    return names


def test_imports_point_up_the_layout() -> None:
    order = [name.removesuffix(".py").rstrip("/") for name in layout()]
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue  # the public API names what lies below it, and imports it on first use
        below = [n for n in imported(ast.parse(file.read_text())) if n in order and order.index(n) > order.index(own)]
        assert not below, f"{file.relative_to(ROOT)} imports {below}, which stands below {own} in docs/design.md"
