"""UnicodeText: every string up to a length.

`gymnasium.spaces.Text` lists its alphabet, which takes seconds and 250 MB for all of Unicode. This one is a Text, so
that Gymnasium batches and wraps it as text, and checks the length only.
"""

import string
from typing import Any

from gymnasium.spaces import Text

_SAMPLE_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " 你好加减乘等于答案"
_SAMPLE_LENGTH = 64


class UnicodeText(Text):
    """Strings of at most `max_length` code points, whichever; `seed` is of `sample`."""

    def __init__(self, max_length: int, *, seed: int | None = None) -> None:
        # An ordered string: a set would make samples depend on PYTHONHASHSEED.
        super().__init__(max_length, min_length=0, charset=_SAMPLE_CHARACTERS, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """At most 64 printable characters. `mask` and `probability` are Text's."""
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        length = self.np_random.integers(min(self.max_length, _SAMPLE_LENGTH) + 1)
        picks = self.np_random.integers(len(_SAMPLE_CHARACTERS), size=length)
        return "".join(_SAMPLE_CHARACTERS[pick] for pick in picks)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"
