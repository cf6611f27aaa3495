"""Identity of a run's data: a value to be kept with the run, and compared when it resumes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dkcls.data.dataset import Dataset
from dkcls.errors import UserError
from dkcls.words import some


@dataclass(frozen=True)
class DataIdentity:
    """Classes in the order of their labels, and the number of images of each split."""

    classes: list[str]
    images: dict[str, int]

    @classmethod
    def of(cls, train: Dataset[Any], val: Dataset[Any]) -> "DataIdentity":
        """Return that of a run's two splits; UserError if their classes are not the same."""
        own, others = list(train.class_names), list(val.class_names)
        if changed := _changed_classes(own, others, "only train has", "only val has"):
            raise UserError(f"data: train and val must have the same classes, but {changed}")
        return cls(own, {"train": len(train), "val": len(val)})

    @classmethod
    def parse(cls, values: Any) -> "DataIdentity":
        """Return what `to_dict` wrote; ValueError if it is something else."""
        good = (
            isinstance(values, Mapping)
            and set(values) == {"classes", "images"}
            and isinstance(values["classes"], list)
            and all(isinstance(name, str) for name in values["classes"])
            and isinstance(values["images"], Mapping)
            and all(type(count) is int and count >= 0 for count in values["images"].values())
        )
        if not good:
            raise ValueError(
                f"its data must be classes and numbers of images, got {str(values)[:200]}"
            )
        return cls(list(values["classes"]), dict(values["images"]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, now: "DataIdentity") -> list[str]:
        """Return what has changed since, a few words for each change."""
        changed = _changed_classes(self.classes, now.classes, "gone:", "new:")
        counts = [
            f"{split} images: {self.images.get(split, 0)}, now {now.images.get(split, 0)}"
            for split in {**self.images, **now.images}
            if self.images.get(split) != now.images.get(split)
        ]
        return [f"classes {changed}", *counts] if changed else counts


def _changed_classes(before: Sequence[str], after: Sequence[str], lost: str, added: str) -> str:
    """Return which names only one of the lists has, or where their order differs; "" if equal."""
    old, new = set(before), set(after)
    alone = {
        lost: [name for name in before if name not in new],
        added: [name for name in after if name not in old],
    }
    found = "; ".join(f"{word} {some(names)}" for word, names in alone.items() if names)
    if found or before == after:
        return found
    first = next((a for a, b in zip(before, after, strict=False) if a != b), "the end")
    return f"in another order: from {first} on"
