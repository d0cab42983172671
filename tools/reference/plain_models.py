"""Target layers and DFlash drafter in plain PyTorch, written from docs/spec/qwen3_5.md and docs/spec/dflash.md.

They compute in the dtype of their weights, sums of norms, softmax and recurrence in float32. `w` maps a layer's tensor
names (without "layers.N.") to tensors; x is [T, D].
"""

import torch
import torch.nn.functional as F


def rms(x, weight, eps, one_plus=False):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + (1.0 if one_plus else 0.0))).to(x.dtype)


def rotate(x, positions, rotary_dim, theta):
    """x: [T, heads, head_dim]; the first rotary_dim elements rotate, pairs (j, j + rotary_dim / 2)."""
    half = rotary_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.to(torch.float64)[:, None] * frequencies[None, :]
    cos, sin = angles.cos().float()[:, None, :], angles.sin().float()[:, None, :]
    a, b = x[..., :half].float(), x[..., half:rotary_dim].float()
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., rotary_dim:]], -1)


def attend(q, k, v, visible, scale):
    """q: [T, heads, d]; k, v: [L, kv_heads, d]; visible: bool [T, L]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * scale
    scores = scores.masked_fill(~visible[None], float("-inf"))
    return (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(0, 1)


def swiglu(x, w):
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return (F.silu(gate.float()).to(x.dtype) * up) @ w["mlp.down_proj.weight"].T


class PlainTarget:
    def __init__(self, config, device):
        self.config, self.device = config, device

    def full_attention(self, w, x):
        c = self.config
        T, heads, kv_heads, dim = x.shape[0], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        rope = c["rope_parameters"]
        both = (x @ w["self_attn.q_proj.weight"].T).view(T, heads, 2 * dim)
        q, gate = both[..., :dim], both[..., dim:]
        k = (x @ w["self_attn.k_proj.weight"].T).view(T, kv_heads, dim)
        v = (x @ w["self_attn.v_proj.weight"].T).view(T, kv_heads, dim)
        positions = torch.arange(T, device=x.device)
        rotary = int(dim * rope["partial_rotary_factor"])
        q = rotate(rms(q, w["self_attn.q_norm.weight"], c["rms_norm_eps"], True), positions, rotary, rope["rope_theta"])
        k = rotate(rms(k, w["self_attn.k_norm.weight"], c["rms_norm_eps"], True), positions, rotary, rope["rope_theta"])
        out = attend(q, k, v, positions[None, :] <= positions[:, None], dim**-0.5)
        out = out * torch.sigmoid(gate.float()).to(x.dtype)
        return out.reshape(T, -1) @ w["self_attn.o_proj.weight"].T

    def linear_attention(self, w, x):
        c = self.config
        T, HK, HV = x.shape[0], c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv, taps = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        u = x @ w["linear_attn.in_proj_qkv.weight"].T
        z = (x @ w["linear_attn.in_proj_z.weight"].T).view(T, HV, dv)
        beta = torch.sigmoid((x @ w["linear_attn.in_proj_b.weight"].T).float())
        decay = (x @ w["linear_attn.in_proj_a.weight"].T).float() + w["linear_attn.dt_bias"].float()
        g = -w["linear_attn.A_log"].float().exp() * F.softplus(decay)
        kernel = w["linear_attn.conv1d.weight"][:, 0, :].float()
        padded = F.pad(u.float(), (0, 0, taps - 1, 0))
        mixed = F.silu(sum(padded[j : j + T] * kernel[:, j] for j in range(taps))).to(x.dtype).float()
        q, k, v = mixed[:, : HK * dk], mixed[:, HK * dk : 2 * HK * dk], mixed[:, 2 * HK * dk :]
        q, k, v = q.view(T, HK, dk), k.view(T, HK, dk), v.view(T, HV, dv)
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * dk**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        q, k = q.repeat_interleave(HV // HK, 1), k.repeat_interleave(HV // HK, 1)
        state = torch.zeros(HV, dk, dv, device=x.device)
        out = torch.empty(T, HV, dv, device=x.device)
        for t in range(T):
            state = state * g[t].exp()[:, None, None]
            correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * correction[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        normed = rms(out.to(x.dtype), w["linear_attn.norm.weight"], c["rms_norm_eps"])
        out = (normed.float() * F.silu(z.float())).to(x.dtype)
        return out.reshape(T, -1) @ w["linear_attn.out_proj.weight"].T

    def layer(self, index, w, x):
        eps = self.config["rms_norm_eps"]
        full = self.config["layer_types"][index] == "full_attention"
        mixer = self.full_attention if full else self.linear_attention
        x = x + mixer(w, rms(x, w["input_layernorm.weight"], eps, True))
        return x + swiglu(rms(x, w["post_attention_layernorm.weight"], eps, True), w)


class TransformersTarget:
    """The same layers by the library's own modules, one at a time; kept where a layer's weights are always the same."""

    def __init__(self, config, device, keep=False):
        from transformers.models.qwen3_5 import modeling_qwen3_5 as library
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        self.library, self.device = library, device
        self.config = Qwen3_5TextConfig(**{key: value for key, value in config.items() if key != "model_type"})
        self.config._attn_implementation = "sdpa"
        self.rotary = library.Qwen3_5TextRotaryEmbedding(self.config).to(device)
        self.keep, self.modules = keep, {}

    def module(self, index, w):
        if index in self.modules:
            return self.modules[index]
        with torch.device("meta"):
            layer = self.library.Qwen3_5DecoderLayer(self.config, index)
        layer.load_state_dict(w, strict=True, assign=True)
        layer.eval()
        if self.keep:
            self.modules[index] = layer
        return layer

    def layer(self, index, w, x):
        layer = self.module(index, w)
        x = x[None]
        positions = torch.arange(x.shape[1], device=self.device)[None]
        rotation = self.rotary(x, positions[None].expand(3, -1, -1))
        out = layer(x, position_embeddings=rotation, attention_mask=None, position_ids=positions)
        return (out[0] if isinstance(out, tuple) else out)[0]


class PlainDrafter:
    """All of a block pass; w: all of the drafter's tensors, by full name."""

    def __init__(self, config):
        self.config = config

    def features(self, w, taps):
        return rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"], self.config["rms_norm_eps"])

    def block(self, w, features, block_rows):
        """features: [P, D] of positions 0..P-1; block_rows: embeddings [B, D] of anchor and masks. Returns [B, D]."""
        c = self.config
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        eps, theta, window = c["rms_norm_eps"], c["rope_theta"], c.get("sliding_window")
        P, B = features.shape[0], block_rows.shape[0]
        device = features.device
        keys_at, queries_at = torch.arange(P + B, device=device), torch.arange(P, P + B, device=device)
        h = block_rows
        for index, kind in enumerate(c["layer_types"]):
            lw = {n[len(f"layers.{index}.") :]: t for n, t in w.items() if n.startswith(f"layers.{index}.")}
            g = rms(h, lw["input_layernorm.weight"], eps)
            both = torch.cat([features, g])
            q = rms((g @ lw["self_attn.q_proj.weight"].T).view(B, heads, dim), lw["self_attn.q_norm.weight"], eps)
            k = rms((both @ lw["self_attn.k_proj.weight"].T).view(P + B, kv_heads, dim), lw["self_attn.k_norm.weight"], eps)
            v = (both @ lw["self_attn.v_proj.weight"].T).view(P + B, kv_heads, dim)
            q, k = rotate(q, queries_at, dim, theta), rotate(k, keys_at, dim, theta)
            distance = queries_at[:, None] - keys_at[None, :]
            visible = torch.ones_like(distance, dtype=torch.bool)
            if kind == "sliding_attention":
                visible = (distance >= 0) & (distance < window)
            h = h + attend(q, k, v, visible, dim**-0.5).reshape(B, -1) @ lw["self_attn.o_proj.weight"].T
            h = h + swiglu(rms(h, lw["post_attention_layernorm.weight"], eps), lw)
        return rms(h, w["norm.weight"], eps)
