"""What cheap policies earn: at most 0.30 anywhere, and 0.15 at the highest difficulty of a family."""

import os

import pytest

from tests.gym.cheat_policies import KINDS, panel

FULL = os.environ.get("SKYRL_TEST_FULL") == "1"


@pytest.mark.parametrize("lang", ["en", "zh"] if FULL else ["en"])
@pytest.mark.parametrize(("name", "options", "highest"), KINDS)
def test_no_cheat_earns_much(name, options, highest, lang):
    rates = panel(name, {**options, "split": "val", "lang": lang}, 200 if FULL else 40)
    assert max(rates.values()) <= (0.15 if highest else 0.30), rates
