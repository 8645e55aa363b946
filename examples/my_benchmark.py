"""A benchmark of your own, with an env of its own. Rows: {"country": "Peru", "capital": "Lima"}.

skyrl-trainer eval agent --plugin examples/my_benchmark.py --bench capitals --data rows.jsonl --base-url URL
"""

import gymnasium

from skyrl_eval import data
from skyrl_eval.benchmarks import Benchmark, Sample, final, register_benchmark, verdict


class Guesses(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        return f"What is the capital of {self.task['country']}?", {}

    def step(self, action):
        return f"It begins with {self.task['initial']}.", 0.0, action.startswith(self.task["initial"]), False, {}


gymnasium.register("mine/guesses-v0", Guesses)


@register_benchmark
class Capitals(Benchmark):
    name, steps = "capitals", 3

    class Row(data.Row):
        country: str
        capital: str

    def item_of(self, row):
        return self.item(row.country, row.country, row.capital, initial=row.capital[0])

    def env(self, item):
        task = {"country": item.question, "initial": item.meta["initial"]}
        return Sample(f"{self.name}:{item.item_id}", "mine/guesses-v0", 0, {"task": task})

    def grade(self, item, attempt, context):
        return verdict(item, attempt, float(final(attempt.answer) == item.gold), final(attempt.answer))
