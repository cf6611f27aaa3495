"""Image classification as a task for the engine."""

from dkcls.classification.task import Classification

__all__ = ["Classification"]
