"""Nothing here is timed: a busy machine must not fail a property."""

import signal

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell's background jobs ignore Ctrl-C, and so does all that they start: tests that send it need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)
