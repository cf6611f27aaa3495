"""Errors that end a command early, and the exit code that tells a script why."""

INTERRUPTED = 75  # EX_TEMPFAIL: asked to stop; running the same command again resumes


class UserError(Exception):
    """An error that the person who started the run can put right, shown as one sentence."""


class Interrupted(Exception):
    """A signal asked the run to stop, and everything is saved."""


class RankError(Exception):
    """An error on one rank after start-up. That rank prints it; the others fail as they lose it."""


class DataError(RuntimeError):
    """An error that ends the reading of data: one sentence for who started the run."""
