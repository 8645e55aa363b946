"""The model that learns, and its frozen copy: log-probabilities in, optimizer steps out."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from accelerate import Accelerator, AutocastKwargs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from skyrl_trainer.agent.tokenizer import load_tokenizer
from skyrl_trainer.data import typed
from skyrl_trainer.errors import UserError
from skyrl_trainer.files import written_aside
from skyrl_trainer.learner.checks import check_architecture, check_weights
from skyrl_trainer.learner.loading import checkpoint_layers, compile_layers, load_model, use_threads
from skyrl_trainer.learner.ranks import Ranks, reshard, whole
from skyrl_trainer.learner.segments import Segments
from skyrl_trainer.process_memory import LOGITS_AT_ONCE
from skyrl_trainer.registry import load
from skyrl_trainer.settings import Config
from skyrl_trainer.types import LearnerState, TrainingBatch


class Scorer:
    """A causal LM that gives the log-probabilities of sampled tokens.
    Weights that learn are float32 masters, for a learning rate of 1e-6 would vanish in the rounding of bfloat16: with
    `trainer.policy.model.dtype=bfloat16` the passes run under autocast. ranks: the learners that it is one of.
    """

    def __init__(self, config: Config, model_path: str, ranks: Ranks | None = None) -> None:
        self.config, self.model_path, self.ranks = config, model_path, ranks or Ranks()
        self.inverse_temperature = 1.0 / config.generator.temperature
        self.published_dtype = getattr(torch, config.trainer.policy.model.dtype)
        self.accelerator = Accelerator(
            cpu=config.trainer.placement.policy_num_gpus_per_node == 0,
            mixed_precision="bf16" if self.published_dtype == torch.bfloat16 else "no",
            kwargs_handlers=[AutocastKwargs(cache_enabled=False)],  # of all weights
        )
        dtype, how = self.loading()
        # Not train(): dropout would put noise in every ratio, and there is no other difference.
        self.model = load_model(model_path, dtype, **how).eval()
        self.divide()
        load("skyrl_trainer.learner.cpu_linear:use_onednn")(self.model)
        check_architecture(self)
        reshard(self.model)
        if self.device.type == "cuda":
            compile_layers(self.model)
        if config.trainer.gradient_checkpointing:
            checkpoint_layers(self.model, model_path)

    def loading(self) -> tuple[torch.dtype, dict[str, Any]]:
        """The weights' precision, and what else `from_pretrained` takes."""
        return torch.float32, {}

    def divide(self) -> None:
        """From the processor to where it computes."""
        if self.ranks.size == 1:
            self.model.to(self.device)
        self.ranks.shard(self.model)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def dtype(self) -> torch.dtype:
        """In which losses are computed: float32, or the weights' own where that is more."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def hidden(self, batch: TrainingBatch) -> Tensor:
        """What the last layer says where each sampled token is predicted, [N, H]."""
        segments = Segments(batch.lengths_S, batch.prefix_S, self.device)
        with self.accelerator.autocast():
            hidden_1PH = self.model.base_model(
                batch.ids_P[None], position_ids=batch.places_P[None], use_cache=False, segments=segments
            ).last_hidden_state
        return hidden_1PH[0].index_select(0, batch.predictors_N)

    def logprobs(
        self, batch: TrainingBatch, hidden_NH: Tensor | None = None, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each sampled token, [N] each, at the temperature of the sampler, as the engine
        returns them. hidden_NH: of this batch, where it is known."""
        hidden_NH = self.hidden(batch) if hidden_NH is None else hidden_NH
        chunk = max(1, LOGITS_AT_ONCE[self.device.type] // self.model.config.vocab_size)
        score = self.scoring(len(hidden_NH) > chunk, entropy_gradient)
        with self.accelerator.autocast():
            pieces = map(score, hidden_NH.split(chunk), batch.target_ids_N.split(chunk))
            logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def scoring(self, chunked: bool, entropy_gradient: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What computes them, from hidden [N, H] and targets [N]."""
        head = self.model.get_output_embeddings()

        def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = head(hidden)
            logits = (logits if logits.dtype == torch.float64 else logits.float()) * self.inverse_temperature
            sums = logits.logsumexp(-1)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = sums - ((logits - sums[:, None]).exp() * logits).sum(-1)
            return logits.gather(-1, targets[:, None]).squeeze(-1) - sums, entropy

        if self.device.type == "cuda":  # no float32 logits in memory
            score = torch.compile(score, dynamic=True)
        # A chunk's logits are dropped after the forward pass and made again for its backward pass.
        return partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False) if chunked else score

    @torch.no_grad()
    def token_logprobs(self, ids: list[int]) -> Tensor:
        """log-softmax after each token of one sequence, at temperature 1: float32 [T, V] on the CPU."""
        with self.accelerator.autocast():
            logits_TV = self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0]
        return logits_TV.float().log_softmax(-1).cpu()


class Optimized:
    """AdamW and its schedule, of a learner or a critic; methods are called on all learners alike."""

    config: Config
    model: PreTrainedModel
    ranks: Ranks
    prefix = ""  # of the names in a state

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimizer changes, by name."""
        raise NotImplementedError

    def make_optimizer(self, parts: list[list[nn.Parameter]], learning_rate: float, total_steps: int) -> None:
        """parts: sharded and whole weights, which no fused step takes together. total_steps: of the run."""
        self.parts, settings = parts, self.config.trainer
        groups = [{"params": part} for part in parts]
        try:
            fused = not settings.optimizer_kwargs.get("foreach")
            self.optimizer = torch.optim.AdamW(groups, learning_rate, **{"fused": fused, **settings.optimizer_kwargs})
            _, _ = self.optimizer.defaults["betas"]  # are two
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            raise UserError(f"trainer.optimizer_kwargs does not fit torch.optim.AdamW: {error}.") from error
        warm = settings.warmup_steps
        self.scheduler = self._schedule(settings.lr_scheduler_type, warm, total_steps + (warm > 0))
        if warm:  # at rate 0 the first rollout would be wasted
            self.optimizer.step()  # moves nothing, as there is no gradient
            self.scheduler.step()

    def _schedule(self, kind: str, warm: int, total: int) -> LambdaLR:
        def rate(step: int) -> float:
            falling = (total - step) / max(1, total - warm) if kind == "linear" else 1.0
            return step / warm if step < warm else max(0.0, falling)

        if kind in ("constant", "constant_with_warmup", "linear"):  # transformers' own import peft: five seconds
            return LambdaLR(self.optimizer, rate)
        name, _, words = kind.partition("?")
        own = {key: typed(value) for key, value in parse_qsl(words)}
        try:
            if own and name.startswith("constant"):
                raise ValueError("it takes no arguments")
            schedule = load("transformers:get_scheduler")(name, self.optimizer, warm, total, own)
            if not isinstance(schedule, LambdaLR):
                raise ValueError("it goes by a metric, which training has not")
            schedule.lr_lambdas[0](warm)  # reads its arguments
            return schedule
        except (TypeError, ValueError) as error:
            raise UserError(f"trainer.lr_scheduler_type={kind!r} cannot be used: {error}; take linear, say.") from error

    def clip_gradients(self) -> Tensor:
        """Clips to `trainer.max_grad_norm`; returns the norm before. No gradient is one of zeros: momentum acts."""
        for parameter in (each for part in self.parts for each in part):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter, DTensor):  # every learner has all of it, and the gradient of its own rows
                self.ranks.sum(parameter.grad)
        norms = [whole(get_total_norm([p.grad for p in part if p.grad is not None])) for part in self.parts]
        norm = norms[0] if len(norms) == 1 else torch.stack([each.cpu() for each in norms]).norm()
        for part in self.parts:
            clip_grads_with_norm_(part, self.config.trainer.max_grad_norm, norm)
        return norm

    def step(self) -> float:
        """Takes the optimizer step, clears the gradients, and returns the learning rate that was used."""
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.clear_gradients()
        reshard(self.model)
        return learning_rate

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> LearnerState:
        """Everything that the next optimizer step depends on. No random state: nothing here draws a number."""
        tensors = {}
        for name, parameter in self.trainable().items():
            tensors[f"{self.prefix}model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{self.prefix}optimizer.{key}.{name}"] = value
        return LearnerState(tensors, {f"{self.prefix}scheduler": self.scheduler.state_dict()})

    @torch.no_grad()
    def load_state_dict(self, state: LearnerState) -> None:
        """Puts back what `state_dict` took, each where its weight lies."""
        named = self.trainable()
        for name, parameter in named.items():
            parameter.copy_(self.ranks.scatter(state.tensors[f"{self.prefix}model.{name}"], parameter))
        self.optimizer.state.clear()
        for full_name, value in state.tensors.items():
            kind, _, rest = full_name.partition(".")
            if kind == f"{self.prefix}optimizer":
                key, _, name = rest.partition(".")
                value = self.ranks.scatter(value, named[name])
                self.optimizer.state[named[name]][key] = value.to(named[name].device, copy=True)
        self.scheduler.load_state_dict(state.numbers[f"{self.prefix}scheduler"])
        # The rate of the next step, which a schedule sets only when it moves on.
        for group, learning_rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = learning_rate


class Learner(Optimized, Scorer):
    """total_optimizer_steps: of the whole run."""

    lora: Any = None
    """Its options, where an adapter learns (learner/lora.py)."""

    def __init__(self, config: Config, model_path: str, total_optimizer_steps: int, ranks: Ranks | None = None) -> None:
        super().__init__(config, model_path, ranks)
        self.tokenizer = load_tokenizer(model_path)
        self.total_optimizer_steps = total_optimizer_steps
        self.parameters = list(self.trainable().values())
        self.make_optimizer([self.parameters], config.trainer.learning_rate, total_optimizer_steps)
        self.optimizer_steps = 0
        self._sender: Any = None

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in reshard(self.model).named_parameters() if p.requires_grad}

    def step(self) -> float:
        self.optimizer_steps += 1
        return super().step()

    def full_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return reshard(self.model).named_parameters()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, in a fixed order, tied ones once, in the engine's precision."""
        for name, parameter in self.full_tensors():
            # The parameter itself where it can be: the weight sync then moves it into shared memory.
            same = parameter.dtype == self.published_dtype
            yield name, parameter if same else parameter.detach().to(self.published_dtype)

    def share_weights(self) -> None:
        """No buffer of its own: a weight sync moves these weights into its own (see LearnerGroup's)."""

    def transfer(self, method: str, *arguments: Any) -> Any:
        """A method of WeightSender, on all learners alike."""
        if self._sender is None:
            self._sender = load("skyrl_trainer.weight_sync.nccl:WeightSender")(self.named_tensors, self.ranks.rank)
        return self._sender.call(method, *arguments)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def reference(self) -> Scorer:
        """The policy that the run started from, frozen."""
        return Scorer(self.config, self.model_path, self.ranks)

    def save_pretrained(self, folder: Path, step: int = 0) -> None:
        """Writes a Hugging Face folder, which notes the step: never half a model, nor a broken one (UserError)."""
        tensors = {}
        for name, tensor in self.named_tensors():
            full = whole(tensor.detach())
            if self.ranks.rank == 0:  # the others only take part
                tensors[name] = full.cpu()  # beside an awake engine a GPU has no room for them
        if not tensors:
            return
        check_weights(tensors, self.optimizer_steps)
        with written_aside(folder) as aside:
            self.write(tensors, aside)
            path, dtype = aside / "config.json", self.config.trainer.policy.model.dtype
            settings = json.loads(path.read_text()) | {"dtype": dtype, "skyrl_step": step}
            path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
            self.tokenizer.save_pretrained(aside)

    def write(self, tensors: dict[str, Tensor], folder: Path) -> None:
        self.model.save_pretrained(folder, state_dict=tensors)

    def state_dict(self) -> LearnerState:
        state = super().state_dict()
        return LearnerState(state.tensors, {"optimizer_steps": self.optimizer_steps, **state.numbers})

    def load_state_dict(self, state: LearnerState) -> None:
        """UserError when the state is another model's."""
        named = self.trainable()
        saved = {key.removeprefix("model.") for key in state.tensors if key.startswith("model.")}
        wrong = [n for n, p in named.items() if n not in saved or state.tensors[f"model.{n}"].shape != p.shape]
        if wrong or saved - named.keys():
            odd = (wrong or sorted(saved - named.keys()))[0]
            raise UserError(f"The checkpoint is not of {self.model_path}: {odd} differs; resume with the same model.")
        super().load_state_dict(state)
        self.optimizer_steps = int(state.numbers["optimizer_steps"])


def make_learner(config: Config, model_path: str, total_optimizer_steps: int, ranks: Ranks | None = None) -> Learner:
    """A Learner of all weights or, with a rank in `trainer.policy.model.lora`, of an adapter."""
    use_threads(config, ranks.size if ranks else 1)
    adapts = config.trainer.policy.model.lora.rank > 0
    kind = load("skyrl_trainer.learner.lora:LoRALearner") if adapts else Learner
    return kind(config, model_path, total_optimizer_steps, ranks)
