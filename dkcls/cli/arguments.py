"""Arguments that commands share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dkcls.config import ModelConfig

REQUIRED: Any = "???"  # omegaconf's word for a value that has to be given


@dataclass
class NamedModel:
    """The network of a file of weights that does not say which it is."""

    name: str | None = None  # a name in timm; not needed for checkpoints and exports of ours

    def config(self) -> "ModelConfig":
        from dkcls.config import ModelConfig

        return ModelConfig(name=self.name)
