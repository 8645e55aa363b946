"""What a model takes, from its config.json alone."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, Self

from skyrl_trainer.errors import UserError
from skyrl_trainer.registry import load
from skyrl_trainer.settings import Config

QWEN_1_5B = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
QWEN_1_5B |= {"intermediate_size": 8960, "vocab_size": 151_936}
KNOWN: dict[str, dict[str, Any]] = {"Qwen/Qwen2.5-1.5B": QWEN_1_5B}
KNOWN |= {"Qwen/Qwen2.5-1.5B-Instruct": {**QWEN_1_5B, "max_position_embeddings": 32_768}}
"""Shapes of the recipes' models, for a plan before the model has been downloaded."""


class ModelShape(NamedTuple):
    parameters: int
    active: int
    """Parameters that a token is multiplied with: all but input embeddings that are not also the head."""
    vocabulary: int
    width: int
    """Bytes of one number."""
    kv_bytes: int
    """Of the keys and values of one token, over all layers."""
    matrices: int
    """Parameters of the linear layers below the head."""
    sides: dict[str, int]
    """Linear layers by the ends of their names: rows plus columns, over all layers."""
    layers: int
    hidden: int
    kept: int
    """Numbers that one layer keeps of a token for its backward pass, about."""

    @classmethod
    def of(cls, config: dict[str, Any], dtype: str) -> Self:
        """From a config.json of the dense Llama, Qwen2 and Qwen3 kind, without norms and biases; else KeyError."""
        if {"num_experts", "num_local_experts", "n_routed_experts"} & config.keys():
            raise KeyError("experts")
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        size, middle = config.get("head_dim") or hidden // heads, config["intermediate_size"]
        query, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
        vocabulary, width = config["vocab_size"], 4 if dtype == "float32" else 2
        others = {"q_proj": query, "k_proj": kv, "v_proj": kv, "o_proj": query}
        others |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), middle)
        matrices, embedding = layers * hidden * sum(others.values()), vocabulary * hidden
        return cls(
            parameters=matrices + embedding * (1 if config.get("tie_word_embeddings", True) else 2),
            active=matrices + embedding,
            vocabulary=vocabulary,
            width=width,
            kv_bytes=2 * layers * kv * width,
            matrices=matrices,
            sides={name: layers * (hidden + other) for name, other in others.items()},
            layers=layers,
            hidden=hidden,
            kept=8 * hidden + 2 * query + 2 * kv + 4 * middle,
        )


def config_file(config: Config) -> Path | None:
    """The model's config.json; None where it is not downloaded yet."""
    path = config.trainer.policy.model.path
    file = Path(path).expanduser() / "config.json"
    if not file.parent.is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        found = load("huggingface_hub:try_to_load_from_cache")(path, "config.json")
        return Path(found) if isinstance(found, str) else None
    return file


def model_shape(config: Config) -> ModelShape | None:
    """None where it can't be known: not downloaded, or of another kind. UserError: no model, or too few positions."""
    generator, dtype = config.generator, config.trainer.policy.model.dtype
    made = described(config)
    kind = (made.get("rope_parameters") or {}).get("rope_type", "default")
    stretched = made.get("rope_scaling") or kind != "default" or "hf_overrides" in generator.engine_kwargs
    most = made.get("max_position_embeddings")
    if most and not stretched and generator.max_model_len > most:
        name = f"trainer.policy.model.path={config.trainer.policy.model.path}"
        raise UserError(
            f"generator.max_model_len={generator.max_model_len}, and {name} has {most} positions: lower it."
        )
    try:
        return ModelShape.of(made, dtype)
    except KeyError:
        return None
    except (TypeError, ZeroDivisionError):
        raise UserError(f"trainer.policy.model.path: {config_file(config)} is not a model's config.json.") from None


def positions(config: Config) -> int:
    """0 where nobody knows."""
    made = described(config)
    return int(made.get("text_config", made).get("max_position_embeddings") or 0)


def described(config: Config) -> dict[str, Any]:
    """Its config.json; {} where nobody knows."""
    model = config.trainer.policy.model
    if model.path == "tiny":
        return {**load("skyrl_trainer.tiny.init_policy:tiny_settings")(model.tiny.config_kwargs)}
    file = config_file(config)
    if file is None:
        return KNOWN.get(model.path, {})
    try:
        return {**json.loads(file.read_text())}
    except (OSError, ValueError, TypeError):
        missing = file if file.parent.is_dir() else f"folder {file.parent}"
        what = f"{file} is not a model's config.json" if file.is_file() else f"there is no {missing}"
        raise UserError(f"trainer.policy.model.path: {what}.") from None
