"""What ends a run early, and the exit code that tells a script why."""

INTERRUPTED = 75  # EX_TEMPFAIL: asked to stop; the same command goes on


class UserError(Exception):
    """What the person who started the run can put right: shown as one sentence, without a stack trace."""


class Interrupted(Exception):
    """A signal asked the run to stop, and everything is saved."""


class RankError(Exception):
    """What went wrong on this rank alone, too late to tell the others: it says so itself, and they end as they lose it."""
