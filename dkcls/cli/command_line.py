"""Words of a command line: plug-ins are imported, keys are checked before anything else is."""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from dkcls.config import Config, keys, unknown_key
from dkcls.errors import UserError

PLUGIN = "--plugin"
imported: list[str] = []  # the plug-ins of this process, in their order


def take_plugins(words: Sequence[str]) -> list[str]:
    """Import what `--plugin MODULE` names, and return the other words."""
    left, found = [], []
    rest = iter(words)
    for word in rest:
        flag, given, module = word.partition("=")
        if flag != PLUGIN:
            left.append(word)
            continue
        module = module if given else next(rest, "")
        if module.endswith(".py") or not all(map(str.isidentifier, module.split("."))):
            raise UserError(
                f"--plugin needs the name of a module, as in --plugin my_module, got {module!r}"
            )
        found.append(module)
    import_plugins(found)
    return left


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register things of their own; the current folder's are found too."""
    for module in modules:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module.split(".")[0] and error.name != module:
                raise
            raise UserError(
                f"--plugin {module}: there is no module {error.name} in this folder, "
                "nor is one installed"
            ) from error
        if module not in imported:
            imported.append(module)


def key_of(word: str) -> str:
    """Return the key of an override: the `data.root` of +data.root=/x."""
    return word.lstrip("+~").partition("=")[0]


def overrides(words: Iterable[str]) -> list[str]:
    """Return the words that give a key a value; the others are flags, and what belongs to them."""
    return [word for word in words if "=" in word and not word.startswith("-")]


def check_words(words: Iterable[str], kind: type = Config, groups: Iterable[str] = ()) -> None:
    """Raise UserError for a key that there is not, before Hydra is imported.

    Args:
        kind: the dataclass that declares the keys.
        groups: words of which GROUP=NAME chooses a file.
    """
    known = keys(kind)
    valid = {key.name for key in known} | set(groups)
    open_keys = tuple(f"{key.name}." for key in known if key.is_open)
    for word in overrides(words):
        key = key_of(word).partition("@")[0]
        is_hydras = key.replace("/", ".").split(".")[0] == "hydra"
        if key not in valid and not is_hydras and not key.startswith(open_keys):
            raise UserError(unknown_key(key, kind))


def with_plus(words: Iterable[str], kind: type = Config) -> list[str]:
    """Return the words with `++` before keys that Hydra's schema cannot know.

    Those are what is in dictionaries of free content, and in `data` of an evaluation.
    """
    prefixes = [f"{key.name}." for key in keys(kind) if key.is_open]
    prefixes += [f"{name}." for name in getattr(kind, "PARTIAL", {})]
    return [f"++{word}" if word.startswith(tuple(prefixes)) else word for word in words]
