"""On-policy distillation: the policy plays, and a teacher tells of each of its tokens how likely it would have been.

    skyrl-trainer train quickstart trainer.run_name=distilled trainer.algorithm.plugin_file=examples/distill.py \\
        trainer.algorithm.name=distill trainer.algorithm.advantage_estimator=teacher generator.num_generations=1 \\
        trainer.algorithm.options.teacher=runs/quickstart/model/best

A sampled token's advantage is log p_teacher - log p_policy, of which the mean is minus the KL of the policy from the
teacher (Agarwal et al., arXiv 2306.13649, with the reverse KL); no reward is learned from. Both have one vocabulary,
which every step checks on its first episode; generator.temperature and generator.top_p stay 1, as the teacher's are.
"""

from functools import cache

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_trainer.errors import UserError
from skyrl_trainer.plugins import LossOptions, PolicyLoss, register_algorithm, register_estimator
from skyrl_trainer.types import AdvantageBatch


@register_algorithm("distill")
class DistillLossMixin(PolicyLoss):
    class Options(LossOptions):
        teacher: str  # a folder, or a model's name on Hugging Face


@cache
def load_teacher(path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval().to(device)
    return model, AutoTokenizer.from_pretrained(path)


def check_vocabulary(tokenizer, trajectory):
    for turn in trajectory.turns:
        text = tokenizer.decode(turn.output_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text[: len(turn.action)] != turn.action[: len(text)]:  # one of them has the end's token, or a stop string
            raise UserError(f"The teacher reads other tokens: {turn.action!r:.60} is {text!r:.60} to it.")


@torch.no_grad()
def logprobs_of(model, trajectory):
    """The model's log-probability of each token that was sampled, in the order of the record."""
    found = []
    for segment in trajectory.segments():  # of a context that grows: one, unless history was rewritten
        ids, sampled = [], []
        for turn in segment:
            ids += turn.prompt_ids
            sampled += range(len(ids), len(ids) + len(turn.output_ids))
            ids += turn.output_ids
        ids_T, sampled_N = torch.tensor(ids, device=model.device), torch.tensor(sampled, dtype=torch.long)
        logits_NV = model(ids_T[None], use_cache=False).logits[0, sampled_N - 1].float()
        found += logits_NV.log_softmax(-1).gather(-1, ids_T[sampled_N, None])[:, 0].tolist()
    return found


@register_estimator("teacher")
def teacher(rewards, options, values=None):
    advantages, (model, tokenizer) = [], load_teacher(options.teacher)
    for trajectory in rewards.trajectories[:1]:
        check_vocabulary(tokenizer, trajectory)
    for trajectory in rewards.trajectories:
        sampled = [logprob for turn in trajectory.turns for logprob in turn.logprobs]
        pairs = zip(logprobs_of(model, trajectory), sampled, strict=True)
        advantages.append([theirs - ours for theirs, ours in pairs])
    return AdvantageBatch(rewards, advantages)
