"""Other projects' interfaces: SkyRL's tutorial, TRL's trainer, GEM's style."""

import importlib.util
import json
import warnings
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import skyrl_gym
from skyrl_gym.adapters import gem
from skyrl_gym.adapters.skyrl import SkyRLEnv
from skyrl_gym.adapters.trl import environment_factory
from skyrl_gym.data import load_rows
from skyrl_gym.parsing import last_answer
from tests.gym.test_all_envs import GUESS, IDS, ROWS


def multiply_env() -> type:
    """The environment that SkyRL's tutorial builds, over the same interface, in our own words."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class MultiplyEnv(BaseTextEnv):
        def __init__(self, env_config={}, extras={}):  # noqa: B006 (the tutorial's signature)
            super().__init__()
            self.ground_truth = extras["reward_spec"]["ground_truth"]
            self.max_turns = extras.get("max_turns", 5)

        def step(self, action: str) -> BaseTextEnvStepOutput:
            self.turns += 1
            answer = last_answer(action)
            right = answer is not None and answer.strip() == str(self.ground_truth).strip()
            done, metadata = right or self.turns >= self.max_turns, {"parsed_answer": answer}
            if done:
                reward = 1.0 if right else 0.5 if answer is not None else 0.0
                return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
            again = {"role": "user", "content": f"{answer} is not it." if answer else "Use \\boxed{...}."}
            return BaseTextEnvStepOutput(observations=[again], reward=0.0, done=False, metadata=metadata)

    return MultiplyEnv


MULTIPLY = {
    "data_source": "synthetic_multiply",
    "prompt": [{"role": "system", "content": "Box the product."}, {"role": "user", "content": "12 * 34"}],
    "env_class": "multiply",
    "reward_spec": {"method": "rule", "ground_truth": "408"},
    "extra_info": {"num_digits": 2, "split": "train"},
}


@pytest.fixture
def multiply():
    skyrl_gym.envs.register(id="multiply", entry_point=multiply_env())
    yield "multiply"
    del gym.registry["multiply"]


def test_skyrls_tutorial_as_skyrl_runs_it(multiply):
    extras = {name: value for name, value in MULTIPLY.items() if name not in ("prompt", "env_class")}
    env = skyrl_gym.make(multiply, env_config={}, extras=extras | {"max_turns": 2})
    assert env.init(MULTIPLY["prompt"]) == (MULTIPLY["prompt"], {})
    first, last = env.step("\\boxed{5}"), env.step("\\boxed{6}")
    assert first["observations"] == [{"role": "user", "content": "5 is not it."}] and not first["done"]
    assert (last["observations"], last["reward"], last["done"]) == ([], 0.5, True)
    assert last["metadata"] == {"parsed_answer": "6"}
    with pytest.raises(ValueError, match=r"knows \['multiply'\], not 'skyrl/text_math-v0'"):
        skyrl_gym.make("skyrl/text_math-v0")
    with pytest.raises(ValueError, match="'multiply' is already registered"):
        skyrl_gym.envs.register(id="multiply", entry_point="other:Env")


def test_skyrls_tutorial_as_a_gymnasium_environment(multiply, tmp_path, monkeypatch):
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([MULTIPLY]), tmp_path / "rows.parquet")
    (row,) = load_rows(tmp_path / "rows.parquet")
    env, twin = gym.make(multiply), gym.make(multiply).unwrapped
    observation, info = env.reset(options={"task": row})
    assert (observation, info["instructions"]) == ("12 * 34", "Box the product.")
    assert env.step("5")[0] == "Use \\boxed{...}."
    twin.set_state(json.loads(json.dumps(env.unwrapped.get_state())))
    assert env.step("\\boxed{5}") == twin.step("\\boxed{5}")
    observation, reward, terminated, truncated, info = env.step("\\boxed{408}")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert (info["success"], info["valid_action"], info["reward_parts"]) == (True, True, {"reward": 1.0})
    with pytest.raises(ValueError, match="This environment plays rows of a dataset"):
        env.reset()
    plain = SkyRLEnv.reset
    monkeypatch.setattr(
        SkyRLEnv, "reset", lambda self, *, seed=None, options=None: plain(self, seed=seed, options={"task": row})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(multiply, extras={"max_turns": 3}).unwrapped)


@pytest.fixture
def own_accelerate_state():
    """What accelerate keeps for the whole process, such as TRL's bfloat16, must not reach other tests."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("own_accelerate_state")
def test_trls_trainer_plays_and_is_rewarded(tmp_path, monkeypatch):
    """GRPOTrainer itself, on a tiny random model; only the sampled text is the expert's instead of the model's."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    templates = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    sizes = {name: 16 for name in ("hidden_size", "intermediate_size", "head_dim")}
    heads = {name: 1 for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))

    class ExpertTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_, **__):
            texts = []
            for environment in self.environments[: len(prompt_ids)]:
                call = {"name": "act", "arguments": {"action": environment.env.unwrapped.expert_action()}}
                text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if not environment.done else "I am done."
                texts.append(tokenizer(f"{text}<|im_end|>")["input_ids"])
            return texts, None

    settings = {"report_to": [], "max_completion_length": 2048, "use_cpu": True, "save_strategy": "no"}
    arguments = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_steps=1, logging_steps=1, **settings
    )
    rows = [{"prompt": [{"role": "user", "content": ""}], "task_id": "val:1:en:3"}] * 2
    trainer = ExpertTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment_factory(GUESS),
    )
    trainer.train()
    metrics = trainer.state.log_history[0]
    assert metrics["rewards/TextEnvironment/mean"] == 1.0 and metrics["tools/failure_frequency"] == 0.0
    assert metrics["tools/call_frequency"] > 1


def test_trls_rows_name_their_task():
    environment = environment_factory(GUESS)()
    assert environment.reset(prompt=[], seed=3, lang="zh", split=None).startswith("请只用数字回答一个整数。\n\n我想了")
    with pytest.raises(ValueError, match="task_id, seed or reward_spec"):
        environment.reset(prompt=[])
    with pytest.raises(ValueError, match="episode is over"):
        environment_factory(GUESS)().act("1")
    environment = environment_factory("text_math")()
    assert environment.reset(**MULTIPLY) is None
    assert environment.act("\\boxed{408}") == "The episode is over." and environment.get_reward() == 1.1


@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ROWS])
def test_gems_loop(env_id):
    env, other = gem.make(env_id), gem.make(env_id)
    observation, info = env.reset(seed=4)
    assert observation == other.reset(4)[0] and observation.startswith(info["instructions"])
    for _ in range(5):
        action = env.sample_random_action()
        assert action == other.sample_random_action()
        observation, reward, terminated, truncated, info = env.step(action)
        assert isinstance(observation, str) and isinstance(reward, float)
        if terminated or truncated:
            break
        other.step(action)
