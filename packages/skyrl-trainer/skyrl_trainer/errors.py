"""Errors that a user can act on: one sentence that names what happened, what was expected and how to fix it."""


class UserError(Exception):
    """Printed without a traceback by the CLI, which then exits with 2."""


class NothingLearned(UserError):
    """An update was refused before the optimizer moved: the weights are still those of a whole step."""


class SyncError(UserError):
    """The engine does not hold the learner's weights after a sync: training must stop."""


class LearnersWait(SyncError):
    """And the learners wait for it, maybe for ever: nothing can be asked of them."""


class EngineDied(UserError):
    """An engine's process is gone for good, or its step loop raised."""


class EngineLost(UserError):
    """An engine's process died in the middle of a call; it may come back."""
