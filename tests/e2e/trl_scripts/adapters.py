"""Adapters in place of the weights, a model object, the loss of GSPO by its arguments, and a callback that stops."""

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from skyrl_trainer import GRPOTrainer


class Enough(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 2


def ends_early(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


args = GRPOConfig(
    sys.argv[2],
    use_cpu=True,
    bf16=False,
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=16,
    max_steps=50,
    importance_sampling_level="sequence",
    loss_type="grpo",
    epsilon=3e-4,
    epsilon_high=4e-4,
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(sys.argv[1]),
    processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
    reward_funcs=[ends_early],
    args=args,
    callbacks=[Enough()],
    train_dataset=Dataset.from_dict({"prompt": [f"{n} - 1 = ?" for n in range(8)]}),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
print("history", [row["step"] for row in trainer.state.log_history])
