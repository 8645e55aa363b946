"""What is said of a name that is no setting; elsewhere.yaml has those of TRL, SkyRL and verl."""

import difflib

from skyrl_gym.data import beside
from skyrl_trainer.errors import UserError
from skyrl_trainer.recipe import Setting


def unknown(setting: Setting, names: list[str]) -> UserError:
    where = f"{setting.name} ({setting.source})"
    if section := [name for name in names if name.startswith(f"{setting.name}.")]:
        return UserError(f"{where} is a section: set one of {', '.join(section)}.")
    words, theirs = setting.name.split(".")[::-1], beside(__file__, "elsewhere.yaml")
    if here := next((theirs[word] for word in words if word in theirs), ""):
        return UserError(f"{where} is not a setting; here it is {here}.")
    ends = {name.rpartition(".")[2]: name for name in names}
    near = [ends[end] for end in difflib.get_close_matches(words[0], ends, 1, 0.8)]
    near = near or difflib.get_close_matches(setting.name, names, 1, 0.85)
    advice = f"did you mean {near[0]}?" if near else "docs/configuration.md lists them all."
    return UserError(f"{where} is not a setting; {advice}")
