"""A loss of your own: GRPO's, but a token with little entropy weighs less. `trainer.algorithm.plugin_file` names it."""

from skyrl_trainer.plugins import PolicyLoss, register_algorithm


@register_algorithm("undecided")  # trainer.algorithm.name=undecided, or undecided_ppo
class UndecidedLossMixin(PolicyLoss):
    def surrogate(self, ratio_N, tokens):
        loss_N, reports = super().surrogate(ratio_N, tokens)
        weight_N = tokens.entropy_N.detach().clamp(0.1, 1.0)
        return weight_N * loss_N, {**reports, "undecided/weight": weight_N}
