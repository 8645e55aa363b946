"""An engine of your own: any causal model of transformers. Slow: for tests, and where there is no vLLM.

    trainer.algorithm.plugin_file=examples/transformers_engine.py generator.backend=transformers

Batched sampling in the open: all requests in flight form one left-padded batch with one key-value cache; the batch is
prefilled anew when requests enter or the weights change. Every request samples with a generator of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from skyrl_trainer.plugins import SteppedEngine, register_engine
from skyrl_trainer.types import GenerationOutput, GenerationRequest
from skyrl_trainer.weight_sync.buffer import FlatBuffer

PREFILL_TOKENS = 16384
"""Prompt tokens admitted before one step: bounds the memory of a prefill."""


@dataclass
class _Sequence:
    key: str
    request: GenerationRequest
    generator: torch.Generator
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_ids + self.output_ids


@register_engine("transformers")
class TransformersEngine(SteppedEngine):
    """See protocols.InferenceEngine. `engine_kwargs` go to `AutoModelForCausalLM.from_pretrained`."""

    @staticmethod
    def env_vars() -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        dtype = getattr(torch, self.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=dtype, **self.engine_kwargs).eval()
        self._generator = torch.Generator().manual_seed(self.seed)
        self._batch: list[_Sequence] = []
        self._entering: list[_Sequence] = []
        self._cache: Any = None
        self._mask_BT = torch.empty(0, 0, dtype=torch.long)
        self._version = 0
        self._buffer: FlatBuffer | None = None
        self._checksum = ""

    def _fits(self, request: GenerationRequest) -> bool:
        entering = sum(len(sequence.request.prompt_ids) for sequence in self._entering)
        return not self._entering or entering + len(request.prompt_ids) <= PREFILL_TOKENS

    def _add(self, key: str, request: GenerationRequest) -> None:
        # Unseeded requests draw a seed, so that their tokens depend on the order of requests only.
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._generator))
        self._entering.append(_Sequence(key, request, torch.Generator().manual_seed(seed)))

    @torch.inference_mode()
    def _step(self) -> list[tuple[str, GenerationOutput]]:
        if self._entering:
            self._batch += self._entering
            self._entering, self._cache = [], None
        logits_BV = self._forward().float()
        finished, staying = [], []
        for row, sequence in enumerate(self._batch):
            reason = self._sample(sequence, logits_BV[row])
            if reason is None:
                staying.append(row)
            else:
                finished.append((sequence.key, self._output(sequence, reason)))
        if finished:
            self._batch = [self._batch[row] for row in staying]
            if self._batch:
                self._mask_BT = self._mask_BT[staying]
                self._cache.batch_select_indices(torch.tensor(staying))
        return finished

    def _forward(self) -> torch.Tensor:
        """Logits after the last token of every sequence, (B, V); one token a sequence where the cache has the rest."""
        if self._cache is None:
            longest = max(len(sequence.token_ids) for sequence in self._batch)
            pads = [longest - len(sequence.token_ids) for sequence in self._batch]
            rows = [[0] * pad + sequence.token_ids for pad, sequence in zip(pads, self._batch, strict=True)]
            self._mask_BT = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
            positions_BT = (self._mask_BT.cumsum(1) - 1).clamp(min=0)
        else:
            rows = [[sequence.output_ids[-1]] for sequence in self._batch]
            self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(self._mask_BT[:, :1])], dim=1)
            positions_BT = self._mask_BT.sum(1, keepdim=True) - 1
        result = self._model(
            input_ids=torch.tensor(rows),
            attention_mask=self._mask_BT,
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = result.past_key_values
        return result.logits[:, -1]

    def _sample(self, sequence: _Sequence, logits_V: torch.Tensor) -> str | None:
        """Appends a token; returns why the sequence ends with it, or None."""
        options = sequence.request.options
        stops = list(options.stop_token_ids)
        if stops and len(sequence.output_ids) < options.min_tokens:
            logits_V[stops] = -torch.inf
        if options.temperature > 0:
            logits_V = _filtered(logits_V / options.temperature, options.top_p)
            token = int(torch.multinomial(logits_V.softmax(-1), 1, generator=sequence.generator))
        else:
            token = int(logits_V.argmax())
        logprobs_V = logits_V.log_softmax(-1)
        sequence.output_ids.append(token)
        sequence.logprobs.append(float(logprobs_V[token]))
        sequence.weight_versions.append(self._version)
        if options.top_logprobs:
            top = logprobs_V.topk(min(options.top_logprobs, logprobs_V.numel()))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            sequence.top_logprobs.append({token: sequence.logprobs[-1], **dict(pairs)})
        if token in stops:
            return "stop"
        full = len(sequence.output_ids) >= options.max_tokens or len(sequence.token_ids) >= self.max_model_len
        return "length" if full else None

    def _output(self, sequence: _Sequence, reason: str) -> GenerationOutput:
        return GenerationOutput(
            request_id=sequence.request.request_id,
            output_ids=sequence.output_ids,
            logprobs=sequence.logprobs,
            weight_versions=sequence.weight_versions,
            finish_reason=reason,
            top_logprobs=sequence.top_logprobs or None,
        )

    @torch.no_grad()
    def _update(self, phase: str, argument: Any) -> Any:
        if phase == "init":
            self._buffer = FlatBuffer(argument["path"], argument["layout"])
        elif phase == "start":
            self._checksum = ""
        elif phase == "update":
            assert self._buffer is not None, "update_weights was called before init_weight_transfer"
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            for name, tensor in self._buffer.tensors.items():
                parameters[name].copy_(tensor)
            self._checksum = self._buffer.checksum()
        else:
            self._cache, self._version = None, argument
            return self._checksum


def _filtered(logits_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits with -inf for every token outside of the smallest set with probability top_p."""
    if top_p < 1:
        sorted_V, order_V = logits_V.sort(descending=True)
        before_V = sorted_V.softmax(-1).cumsum(-1) - sorted_V.softmax(-1)
        logits_V = logits_V.index_fill(0, order_V[before_V >= top_p], -torch.inf)
    return logits_V
