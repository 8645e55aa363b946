"""A reward model: a network that reads a task and its answer and gives a number (Ouyang et al., arXiv 2203.02155)."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from skyrl_trainer.errors import UserError

READ_AT_ONCE = 16  # conversations


class RewardModel:
    """A reward function. It is asked as TRL asks it: with the whole conversation, in its own chat template.
    Example: register_reward("helpful")(RewardModel("Skywork/Skywork-Reward-V2-Qwen3-0.6B"))
    """

    def __init__(self, given: str | Path | PreTrainedModel) -> None:
        """given: a folder, or a name on Hugging Face, loaded when it is first asked; or a model, where it is."""
        self._given = given
        path = given.name_or_path if isinstance(given, PreTrainedModel) else str(given)
        self.__name__, self._path = Path(path).name, path

    @cache  # noqa: B019, a run has few
    def load(self) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer. UserError where they cannot be loaded, or the model has not one output."""
        model: Any = self._given
        try:
            if not isinstance(model, PreTrainedModel):
                load = AutoModelForSequenceClassification.from_pretrained
                told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
                model, found = load(self._path, num_labels=1, dtype="auto", **told)
                if missing := {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}:
                    raise ValueError(f"its files lack {min(missing)} of one output")
                model.to("cuda" if torch.cuda.is_available() else "cpu")
            if model.config.num_labels != 1:
                raise ValueError(f"it has {model.config.num_labels} outputs, and a reward is one")
            tokenizer = AutoTokenizer.from_pretrained(self._path, padding_side="right")
            if not tokenizer.encode("1", add_special_tokens=False):
                raise ValueError("it has no tokenizer")
        except Exception as error:  # safetensors and torch raise their own
            reason = str(error).strip().partition("\n")[0].removesuffix(".")
            raise UserError(f"The reward model {self._path!r} cannot be used: {reason}.") from error
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        return model.eval(), tokenizer

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        (model, tokenizer), scores = self.load(), list[float]()
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        render = partial(tokenizer.apply_chat_template, tokenize=False)
        texts = [each if isinstance(each, str) else render(each) for each in whole]
        for start in range(0, len(texts), READ_AT_ONCE):
            some = texts[start : start + READ_AT_ONCE]
            read = tokenizer(some, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
            scores += model(**read).logits[:, 0].float().tolist()
        return scores
