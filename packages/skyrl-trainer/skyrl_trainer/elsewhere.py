"""What is said of a name that is no setting."""

import difflib

from skyrl_trainer.errors import UserError
from skyrl_trainer.recipe import Setting

ELSEWHERE = {
    **dict.fromkeys(("loss_type", "policy_loss_type", "loss_agg_mode", "loss_reduction"), "trainer.algorithm.name"),
    **dict.fromkeys(("epochs", "total_epochs"), "trainer.max_steps"),
    **dict.fromkeys(("policy_mini_batch_size", "ppo_mini_batch_size"), "trainer.num_mini_batches"),
    "update_epochs_per_batch": "trainer.num_iterations",
    "entropy_coeff": "trainer.algorithm.options.entropy_coef",
    "n_samples_per_prompt": "generator.num_generations",
    "max_generate_length": "generator.max_completion_length",
    "eps_clip_low": "trainer.algorithm.options.epsilon",
    "eps_clip_high": "trainer.algorithm.options.epsilon_high",
    "kl_loss_coef": "trainer.algorithm.options.beta",
    "ckpt_path": "trainer.run_dir",
    "optimizer_config": "trainer.learning_rate, trainer.max_grad_norm and trainer.optimizer_kwargs",
}
"""Names of TRL, SkyRL and verl that are other words here."""


def unknown(setting: Setting, names: list[str]) -> UserError:
    where = f"{setting.name} ({setting.source})"
    if section := [name for name in names if name.startswith(f"{setting.name}.")]:
        return UserError(f"{where} is a section: set one of {', '.join(section)}.")
    last = setting.name.rpartition(".")[2]
    if last in ELSEWHERE:
        return UserError(f"{where} is not a setting; here it is {ELSEWHERE[last]}.")
    ends = {name.rpartition(".")[2]: name for name in names}
    near = [ends[end] for end in difflib.get_close_matches(last, ends, 1, 0.8)]
    near = near or difflib.get_close_matches(setting.name, names, 1, 0.85)
    advice = f"did you mean {near[0]}?" if near else "docs/configuration.md lists them all."
    return UserError(f"{where} is not a setting; {advice}")
