"""Image classification: the task, its metrics, and predictions for files."""

from dkcls.tasks.classification.task import Classification

__all__ = ["Classification"]
