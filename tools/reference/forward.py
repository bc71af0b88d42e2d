"""A plain forward pass of the supported families over the decoded weights of a GGUF, in float64.

An oracle that shares nothing with the engine: no cache (every step computes the whole sequence), no batching, no
quantised arithmetic. Shapes in comments: T tokens, H width of the residual stream, N heads, D width of a head.
"""
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1.0 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def rope(x, theta, divisors, interleaved):
    """x [T, N, D]: rotates pairs (2i, 2i + 1) if interleaved, else (i, i + D / 2), by position * frequency i."""
    tokens, _, dim = x.shape
    frequency = theta ** (-np.arange(0, dim, 2) / dim) / divisors
    angle = np.arange(tokens)[:, None, None] * frequency  # [T, 1, D / 2]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 :])
    out = np.empty_like(x)
    rotated = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = rotated
    else:
        out[..., : dim // 2], out[..., dim // 2 :] = rotated
    return out


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3moe", "granite", "granitemoe")


class Model:
    """The decoded weights and the parameters of one file."""

    def __init__(self, path):
        reader = GGUFReader(path)
        self.fields = {k: f.contents() for k, f in reader.fields.items()}
        self.weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        self.arch = self.fields["general.architecture"]
        if self.arch not in FAMILIES:
            raise SystemExit(f"{path}: no forward pass for architecture {self.arch}")
        self.gemma = self.arch.startswith("gemma")
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.layers = self.key("block_count")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv")
        self.used = set()
        # The least distance of a router's last chosen logit from the next, over all rows and layers so far.
        self.margin = None

    def key(self, name, default=None):
        value = self.fields.get(f"{self.arch}.{name}", default)
        if value is None:
            raise KeyError(f"{self.arch}.{name}")
        return value

    def weight(self, name):
        self.used.add(name)
        return self.weights[name]

    def linear(self, x, name):
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def local(self, layer):
        """Whether a layer sees its sliding window alone: all but each sixth of Gemma 3, every other of Gemma 2."""
        period = {"gemma2": 2, "gemma3": 6}.get(self.arch)
        return period is not None and layer % period != period - 1

    def attention(self, x, layer):
        tokens, block = len(x), f"blk.{layer}."
        heads = lambda part, n: self.linear(x, block + part).reshape(tokens, n, -1)
        q, k, v = heads("attn_q", self.heads), heads("attn_k", self.kv_heads), heads("attn_v", self.kv_heads)
        if block + "attn_q_norm.weight" in self.weights:
            q = rms_norm(q, self.weight(block + "attn_q_norm.weight"), self.eps)
            k = rms_norm(k, self.weight(block + "attn_k_norm.weight"), self.eps)
        dim = q.shape[-1]
        theta, divisors = self.key("rope.freq_base"), np.ones(dim // 2)
        if "rope_freqs.weight" in self.weights:
            divisors = self.weight("rope_freqs.weight")
        if self.arch == "gemma3" and self.local(layer):
            theta = 10000.0
        elif self.fields.get(f"{self.arch}.rope.scaling.type") == "linear":
            divisors = divisors * self.key("rope.scaling.factor")
        interleaved = self.arch in ("llama", "granite", "granitemoe")
        q, k = (rope(y, theta, divisors, interleaved) for y in (q, k))
        k, v = (np.repeat(y, self.heads // self.kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("qnd,knd->nqk", q, k) * self.key("attention.scale", 1.0 / np.sqrt(dim))
        cap = self.key("attn_logit_softcapping", 0.0)
        if cap:
            scores = cap * np.tanh(scores / cap)
        distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
        seen = distance >= 0
        if self.local(layer):
            seen &= distance < self.key("attention.sliding_window")
        p = softmax(np.where(seen, scores, -np.inf))
        return self.linear(np.einsum("nqk,knd->qnd", p, v).reshape(tokens, -1), block + "attn_output")

    def experts(self, x, block):
        """Each row [H] goes through the experts its router likes best."""
        scores, used = self.linear(x, block + "ffn_gate_inp"), self.key("expert_used_count")
        order = np.argsort(-scores, axis=-1, kind="stable")
        if used < scores.shape[-1]:
            last, following = (np.take_along_axis(scores, order[:, i : i + 1], axis=-1) for i in (used - 1, used))
            margin = float((last - following).min())
            self.margin = margin if self.margin is None else min(margin, self.margin)
        chosen = order[:, :used]
        if self.arch == "granitemoe":
            share = softmax(np.take_along_axis(scores, chosen, axis=-1))
        else:
            share = np.take_along_axis(softmax(scores), chosen, axis=-1)
            share /= share.sum(axis=-1, keepdims=True)
        gate, up, down = (self.weight(f"{block}ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        out = np.zeros_like(x)
        for expert in range(scores.shape[-1]):
            rows, places = np.nonzero(chosen == expert)
            h = silu(x[rows] @ gate[expert].T) * (x[rows] @ up[expert].T)
            out[rows] += share[rows, places, None] * (h @ down[expert].T)
        return out

    def feed_forward(self, x, block):
        if self.key("expert_count", 0):
            return self.experts(x, block)
        activation = gelu_tanh if self.gemma else silu
        x = activation(self.linear(x, block + "ffn_gate")) * self.linear(x, block + "ffn_up")
        return self.linear(x, block + "ffn_down")

    def logits(self, tokens):
        """[T, vocabulary]: what follows each of the tokens."""
        embedding = self.weight("token_embd.weight")
        x = embedding[np.asarray(tokens)]
        if self.gemma:
            x = x * np.sqrt(x.shape[-1])
        x = x * self.key("embedding_scale", 1.0)
        residual = self.key("residual_scale", 1.0)
        for layer in range(self.layers):
            block = f"blk.{layer}."
            norm = lambda y, name: rms_norm(y, self.weight(f"{block}{name}.weight"), self.eps)
            y = self.attention(norm(x, "attn_norm"), layer)
            x = x + residual * (norm(y, "post_attention_norm") if self.gemma else y)
            y = self.feed_forward(norm(x, "ffn_norm"), block)
            x = x + residual * (norm(y, "post_ffw_norm") if self.gemma else y)
        x = rms_norm(x, self.weight("output_norm.weight"), self.eps)
        logits = x @ (self.weight("output.weight") if "output.weight" in self.weights else embedding).T
        logits = logits / self.key("logit_scale", 1.0)
        cap = self.key("final_logit_softcapping", 0.0)
        if cap:
            logits = cap * np.tanh(logits / cap)
        unused = set(self.weights) - self.used
        assert not unused, f"tensors without a use: {sorted(unused)}"
        return logits
