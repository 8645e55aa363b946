"""An environment of your own: the policy writes a word backwards.

skyrl-trainer train quickstart environment.env_file=examples/my_env.py \
    'data.train_data=["mine/backwards-v0?split=train"]' 'data.val_data=["mine/backwards-v0?split=val"]'
"""

import gymnasium

from skyrl_gym import Outcome, Task, TextEnv

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPLITS = {"train": 0, "val": 1}  # even numbers are for training


class Backwards(TextEnv):
    choices = {"split": tuple(SPLITS), "difficulty": (1, 2)}

    def count_tasks(self, options):
        return 26 ** (1 + options["difficulty"]) // 2

    def make_task(self, options, index):
        number, split = 2 * index + SPLITS[options["split"]], options["split"]
        places = range(1 + options["difficulty"])
        word = "".join(LETTERS[number // 26**place % 26] for place in places)
        name = f"{split}:{word}"
        return Task(name, f"Backwards: {word}", word[::-1], options["difficulty"], split=split)

    def begin(self, task):
        return task.text

    def act(self, action):
        right = action.strip() == self.task.ground_truth
        parts = {"correct": float(right)}
        return Outcome("", parts, valid_action=True, success=right, terminated=True)

    def expert_action(self):
        return self.task.ground_truth


gymnasium.register("mine/backwards-v0", Backwards)
