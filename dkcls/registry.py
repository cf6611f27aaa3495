"""Registries: things by name, to which a module outside the package can add its own."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Things of one kind by name: in the order in which they were registered, or, where they come
    from modules that are imported on demand, in alphabetical order.

    Args:
        kind: the word for one of them in messages.
        package: the package whose modules register the built-in things when they are imported. A
            look-up imports the module of that name if there is one, and else all of them.
    """

    def __init__(self, kind: str, package: str | None = None):
        self.kind = kind
        self.package = package
        self._things: dict[str, T] = {}
        self._labels: dict[str, str] = {}

    def register(self, name: str, label: str | None = None) -> Callable[[T], T]:
        """Return a decorator that gives a thing its name, and a label for pictures and tables."""

        def add(thing: T) -> T:
            if _place(self._things.get(name, thing)) != _place(thing):
                raise ValueError(f"there is a {self.kind} {name!r} already: {self._things[name]}")
            self._things[name] = thing
            self._labels[name] = label or name
            return thing

        return add

    def find(self, name: str) -> T:
        """Return the thing of that name; ValueError says which there are."""
        if name not in self:
            raise ValueError(
                f"{self.kind} must be one of {', '.join(self)}, got {name!r}; "
                "--plugin MODULE adds those of a module"
            )
        return self[name]

    def label(self, name: str) -> str:
        """Return the name for pictures and tables; an unknown name is its own."""
        return self._labels.get(name, name)

    def registered(self) -> list[str]:
        """Return the names that are registered by now; nothing is imported for it."""
        return list(self._things)

    def __getitem__(self, name: str) -> T:
        if name not in self._things and self.package is not None:
            module = f"{self.package}.{name}"
            if name.isidentifier() and find_spec(module) is not None:
                import_module(module)
            else:
                self._import_all()
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(self._things if self.package is None else sorted(self._things))

    def __len__(self) -> int:
        self._import_all()
        return len(self._things)

    def _import_all(self) -> None:
        if self.package is not None:
            package = import_module(self.package)
            for module in iter_modules(package.__path__):
                import_module(f"{self.package}.{module.name}")


def _place(thing: object) -> tuple[str, str]:
    """Return where a thing is defined: a notebook's cell may be run again, and replaces it."""
    return getattr(thing, "__module__", ""), getattr(thing, "__qualname__", repr(thing))
