"""What the pages name exists: scripts, keys, experiments, options of data sets."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import dkcls.cli
from dkcls.cli.command_line import check_words, key_of, overrides
from dkcls.cli.groups import groups
from dkcls.config import Config, EvalConfig, keys, valid_keys
from dkcls.data import DATASETS
from dkcls.words import keywords

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
SOURCES = [
    *ROOT.glob("scripts/**/*.py"),
    *ROOT.glob("dkcls/cli/**/*.py"),
    *ROOT.glob("configs/*/*.yaml"),
]
COMMAND = re.compile(
    r"(?<![\w/])(train\.py|eval\.py|scripts/[\w/]+\.py|dkcls [a-z-]+)((?: +[^\s`|]+)*)"
)
FULL = {"train.py": Config, "dkcls train": Config, "scripts/bench/trainer.py": Config}
FULL |= {"eval.py": EvalConfig, "dkcls eval": EvalConfig}
KEY = re.compile(r"`((?:model|data|augment|task|optim|schedule|train|log)\.\w+(?:\.\w+)*)[`=]")
# A file's name ends in one of these: train.py is no key.
ENDINGS = ("py", "md", "yaml", "index", "json")
# Arguments of data sets that come from other keys than data.options.
GIVEN = {"split", "root", "training", "seed", "image_size"}
GIVEN |= {"transform", "name", "download", "hflip"}


def commands(text):
    """Yield (script, words) for each command of a text that has KEY=VALUE words."""
    for line in re.sub(r" *\\+\n[ #]*", " ", text).splitlines():
        for script, rest in COMMAND.findall(line):
            words = re.split(r"\s[#(]", rest)[0].split()
            given = [word for word in words if re.match(r"--plugin|--config-dir|[\w.+/]+=.", word)]
            if any("=" in word for word in given):
                yield script, given


def found():
    for page in (*PAGES, *SOURCES):
        for script, words in commands(page.read_text()):
            yield str(page.relative_to(ROOT)), script, " ".join(words)


COMMANDS = sorted(set(found()))


def test_there_are_commands_on_the_pages():
    pages = {page for page, _, _ in COMMANDS}
    assert {"README.md", "docs/train.md", "docs/extend.md", "dkcls/cli/export.py"} < pages
    assert len(COMMANDS) > 80


@pytest.mark.parametrize(("page", "script", "words"), COMMANDS)
def test_a_command_has_keys_and_names_that_exist(page, script, words):
    command = script.removeprefix("dkcls ")
    assert command in dkcls.cli.COMMANDS or (ROOT / script).is_file()
    given = overrides(words.split())
    if script in FULL:
        choices = groups()
        if "--plugin" in words:  # which may bring a task of its own
            given = [word for word in given if not word.startswith("task.")]
        check_words(given, FULL[script], choices)
        for word in given:
            key, _, value = word.partition("=")
            if key in choices and "--" not in words and value not in ("NAME", "...", ""):
                assert value in choices[key], word
    elif given:
        assert {key_of(word).split(".")[0] for word in given} <= arguments_of(script)


def arguments_of(script):
    """Return the names of the keys that a script takes."""
    name = script.removeprefix("dkcls ").replace("-", "_").replace("list", "names")
    places = (ROOT / script, ROOT / f"dkcls/cli/{name}.py", ROOT / f"dkcls/cli/{name}/__init__.py")
    tree = ast.parse(next(path for path in places if path.is_file()).read_text())
    (kind,) = (each for each in tree.body if getattr(each, "name", "") == "Arguments")
    return {each.target.id for each in kind.body if isinstance(each, ast.AnnAssign)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_on_a_page_exist(page):
    valid = set(valid_keys())
    groups_of_keys = {".".join(key.split(".")[:-1]) for key in valid}
    free = tuple(f"{key.name}." for key in keys() if key.is_open)
    for key in KEY.findall(page.read_text()):
        known = key in valid or key in groups_of_keys or key.startswith(free)
        assert known or key.split(".")[-1] in ENDINGS, key


def test_the_page_about_data_has_every_option_of_every_set():
    table = (ROOT / "docs" / "data.md").read_text().split("| set | options")[1].split("\n\n")[0]
    listed, name = {}, ""
    for row in table.splitlines()[2:]:
        cells = row.split("|")
        name = cells[1].strip(" `") or name
        for option, value in re.findall(r"`(\w+)=([^`]+)`", cells[2]):
            listed.setdefault(name, {})[option] = value
    assert listed == {name: options for name in DATASETS if (options := options_of(name))}


def options_of(name):
    """Return the options of a data set with their defaults, as they are typed."""
    parameters = inspect.signature(DATASETS[name]).parameters
    shown = {key: parameters[key].default for key in keywords(DATASETS[name]) if key not in GIVEN}
    return {key: typed(value) for key, value in shown.items()}


def typed(value):
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
