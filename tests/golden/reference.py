"""The outside reference: Hugging Face's Llama on PyTorch, and deliberate mistakes in it.

Everything here runs LlamaForCausalLM as published. Two things are changed, and only in float64:
its RMSNorm and its eager softmax step down to float32 whatever the model's type, so the double run
uses a norm that stays in double and the SDPA attention. The rotary angles stay as Hugging Face has
them (computed in float32), since they are part of the convention a checkpoint was trained with.
"""

import contextlib
import copy
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as hf

IGNORED = -100


def hf_config(model: dict, **extra) -> LlamaConfig:
    """The keys of `model`, copied: LlamaConfig writes into the rope_scaling it is given."""
    return LlamaConfig(**copy.deepcopy(model), use_cache=False, **extra)


def build(config: dict, weights: dict, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    """A model of `config` holding `weights` rounded to `dtype`; rotary frequencies stay float32."""
    model = LlamaForCausalLM(hf_config(config, attn_implementation=attention))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    if set(missing) - tied or unexpected:
        raise RuntimeError(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    model = model.to(dtype)
    rotary.inv_freq = frequencies
    return model.eval()


def _norm_in_double(self, hidden):
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))


@contextlib.contextmanager
def precision_of(dtype: torch.dtype):
    """Inside, RMSNorm keeps float64 inputs in float64; other types run untouched."""
    if dtype is not torch.float64:
        yield
        return
    with mock.patch.object(hf.LlamaRMSNorm, "forward", _norm_in_double):
        yield


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(B, S) cross entropy in at least float32; 0 where the target is ignored."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED,
                           reduction="none").view(targets.shape)


def mean_loss(losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return losses.sum() / (targets != IGNORED).sum()


def evaluate(model: LlamaForCausalLM, tokens: torch.Tensor, targets: torch.Tensor,
             autocast: bool = False, mistake=contextlib.nullcontext()) -> dict:
    """One forward and backward: flat dictionary of every quantity the goldens compare."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    with precision_of(dtype), mistake:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens).logits
        losses = token_losses(logits, targets)
        loss = mean_loss(losses, targets)
        loss.backward()
    result = {"logits": logits.detach().double(), "token_loss": losses.detach().double(),
              "loss": loss.detach().double().reshape(1)}
    squares = 0.0
    for name, parameter in model.named_parameters():
        # A mistake may leave a parameter out; then its gradient is zero.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.detach().double()
        result[f"grad.{name}"] = gradient
        squares += gradient.square().sum().item()
    result["grad_norm"] = torch.tensor([squares**0.5], dtype=torch.float64)
    return result


def train(model: LlamaForCausalLM, tokens: torch.Tensor, targets: torch.Tensor, steps: int,
          lr: float, betas: tuple, eps: float, weight_decay: float, clip: float) -> dict:
    """`steps` AdamW steps on one batch. Losses are those before each step's update."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    kept = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=lr, betas=betas, eps=eps)
    losses, norms = [], []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with precision_of(dtype):
            logits = model(input_ids=tokens).logits
            loss = mean_loss(token_losses(logits, targets), targets)
            loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    result = {"adamw.losses": torch.tensor(losses, dtype=torch.float64),
              "adamw.grad_norms": torch.tensor(norms, dtype=torch.float64)}
    for name, parameter in model.named_parameters():
        result[f"adamw.weight.{name}"] = parameter.detach().double()
    return result


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


# --- mistakes that an implementation could make, each as a change to Hugging Face's code ----------


def _interleaved_rotary(q, k, cos, sin, unsqueeze_dim=1):
    """Pairs (2i, 2i+1), the convention of the original release, instead of (i, i + D/2)."""
    half = cos.shape[-1] // 2
    cos = cos[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
    sin = sin[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)

    def turn(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def _strided_heads(hidden, repeats):
    """Query head h reads key head h mod Hkv instead of h div ratio."""
    return hidden.repeat(1, repeats, 1, 1)


def _attention(mask=None, scale=1.0):
    original = hf.eager_attention_forward

    def forward(module, query, key, value, attention_mask, scaling, **kwargs):
        length = query.shape[2]
        past = torch.ones(length, length, dtype=torch.bool)
        allowed = past.tril() if mask is None else mask(length)
        bias = torch.zeros(length, length, dtype=query.dtype).masked_fill(~allowed, -torch.inf)
        return original(module, query, key, value, bias, scaling * scale, **kwargs)

    return mock.patch.object(hf, "eager_attention_forward", forward)


def _sees_next(length):
    return torch.ones(length, length, dtype=torch.bool).tril(1)


def _sees_all(length):
    return torch.ones(length, length, dtype=torch.bool)


def _swapped_gate(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def _norm_without_weight(self, hidden):
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _norm_without_eps(self, hidden):
    return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True)))


def _late_positions(self, x, position_ids):
    """Positions counted from one: invisible to rotary attention, so it must change nothing."""
    return _rotary_forward(self, x, position_ids + 1)


_rotary_forward = hf.LlamaRotaryEmbedding.forward


def mistakes(config: dict) -> dict:
    """name -> (context manager, config with the mistake) for the mistakes that apply to `config`."""
    changed = {
        "rotary pairs interleaved": mock.patch.object(hf, "apply_rotary_pos_emb", _interleaved_rotary),
        "mask lets the next token be seen": _attention(mask=_sees_next),
        "no causal mask": _attention(mask=_sees_all),
        "scores not scaled": _attention(scale=config["head_dim"] ** 0.5),
        "gate and up projections swapped": mock.patch.object(hf.LlamaMLP, "forward", _swapped_gate),
        "norm weights ignored": mock.patch.object(hf.LlamaRMSNorm, "forward", _norm_without_weight),
        "norm epsilon ignored": mock.patch.object(hf.LlamaRMSNorm, "forward", _norm_without_eps),
    }
    groups = config["num_key_value_heads"]
    if 1 < groups < config["num_attention_heads"]:
        changed["query heads strided over key heads"] = mock.patch.object(hf, "repeat_kv", _strided_heads)
    result = {name: (patch, config) for name, patch in changed.items()}
    if config["rope_scaling"]:
        result["rope scaling ignored"] = (contextlib.nullcontext(), {**config, "rope_scaling": None})
    result["rope theta doubled"] = (contextlib.nullcontext(),
                                    {**config, "rope_theta": 2 * config["rope_theta"]})
    return result


def unchanged_by_shift():
    """Rotary attention depends on distances only; moving every position must change nothing."""
    return mock.patch.object(hf.LlamaRotaryEmbedding, "forward", _late_positions)
