"""Qwen2-VL in PyTorch, under the published names of its weights: vision tower, merger, language model.

Imported by `vision_language.py`, which times it beside `roll`, and by `demo/judge/train.py`, which trains a tiny one. All
pictures of a batch have one size, and all texts the same tokens. Needs torch 2.5 or later.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def config(vocabulary, width, layers, heads, kv_heads, mlp, vision_width, vision_depth, vision_heads, patch, sections,
           first_special):
    """A `config.json` of Qwen2-VL. The five tokens of vision have the ids from `first_special`."""
    vision = {"depth": vision_depth, "embed_dim": vision_width, "num_heads": vision_heads, "mlp_ratio": 4,
              "hidden_size": width, "in_channels": 3, "patch_size": patch, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "hidden_act": "quick_gelu"}
    return {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vocab_size": vocabulary,
            "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "hidden_act": "silu", "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
            "rope_scaling": {"type": "mrope", "mrope_section": sections},
            "vision_start_token_id": first_special, "vision_end_token_id": first_special + 1,
            "vision_token_id": first_special + 2, "image_token_id": first_special + 3,
            "video_token_id": first_special + 4, "vision_config": vision}


def rotate(x, angles):
    """x [.., N, heads, d] by angles [N, d/2], halves against halves."""
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q, k, v, causal):
    """[B, N, heads, d], with fewer heads of k and v."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class VisionBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x, angles):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.attn["qkv"](self.norm1(x)).chunk(3, dim=-1))
        x = x + self.attn["proj"](attend(rotate(q, angles), rotate(k, angles), v, causal=False))
        h = self.mlp["fc1"](self.norm2(x))
        return x + self.mlp["fc2"](h * torch.sigmoid(1.702 * h))


class Tower(nn.Module):
    """Pictures or time steps of a clip, as patches [B, N, values] of one grid, to squares [B, N / 4, width]."""

    def __init__(self, vision):
        super().__init__()
        width, self.patch = vision["embed_dim"], vision["patch_size"]
        self.head = width // vision["num_heads"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(6 * self.patch ** 2, width, bias=False)})
        self.blocks = nn.ModuleList(VisionBlock(width, vision["num_heads"]) for _ in range(vision["depth"]))
        mlp = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, vision["hidden_size"]))
        self.merger = nn.ModuleDict({"ln_q": nn.LayerNorm(width, eps=1e-6), "mlp": mlp})

    def angles(self, rows, columns):
        """Rows and columns of the patches, in squares of two by two, times the frequencies."""
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
        places = places.view(rows // 2, 2, columns // 2, 2, 2).transpose(1, 2).reshape(-1, 2).float()
        quarter = self.head // 4
        frequencies = 1e4 ** (-torch.arange(quarter) / quarter)
        return (places[:, :, None] * frequencies).flatten(1)

    def forward(self, patches, rows, columns):
        x, angles = self.patch_embed["proj"](patches), self.angles(rows, columns)
        for block in self.blocks:
            x = block(x, angles)
        x = self.merger["ln_q"](x)
        return self.merger["mlp"](x.reshape(x.shape[0], x.shape[1] // 4, -1))


def to_patches(pixels, patch):
    """Normalised frames [B, 2, 3, H, W], the two frames of a time step, to patches [B, N, values]."""
    b, frames, channels, height, width = pixels.shape
    x = pixels.view(b, frames, channels, height // patch // 2, 2, patch, width // patch // 2, 2, patch)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(b, (height // patch) * (width // patch), -1)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.head = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
        kv = self.head * c["num_key_value_heads"]
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(width, width), "k_proj": nn.Linear(width, kv),
                                        "v_proj": nn.Linear(width, kv), "o_proj": nn.Linear(width, width, bias=False)})
        mlp = c["intermediate_size"]
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(width, mlp, bias=False),
                                  "up_proj": nn.Linear(width, mlp, bias=False),
                                  "down_proj": nn.Linear(mlp, width, bias=False)})

    def forward(self, x, angles):
        h, attn = self.input_layernorm(x), self.self_attn
        q, k, v = (attn[name](h).unflatten(-1, (-1, self.head)) for name in ("q_proj", "k_proj", "v_proj"))
        x = x + attn["o_proj"](attend(rotate(q, angles), rotate(k, angles), v, causal=True))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


class QwenVl(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.visual = Tower(c["vision_config"])
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(c["vocab_size"], c["hidden_size"]),
                                    "layers": nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"])),
                                    "norm": nn.RMSNorm(c["hidden_size"], 1e-6)})

    def angles(self, positions):
        """Positions [L, 3] (time, row, column) to angles [L, d/2] (M-RoPE)."""
        half = self.config["hidden_size"] // self.config["num_attention_heads"] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        sections = self.config["rope_scaling"]["mrope_section"]
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        return positions.float()[:, axes] * frequencies

    def read(self, tokens, features, positions):
        """Tokens [L] with features [B, squares, width] in place of the placeholders; the states [B, L, width]."""
        x = self.model["embed_tokens"](tokens).expand(features.shape[0], -1, -1)
        kinds = torch.tensor([self.config["image_token_id"], self.config["video_token_id"]])
        places = torch.isin(tokens, kinds).nonzero().flatten()
        x = x.index_copy(1, places, features)
        angles = self.angles(positions)
        for layer in self.model["layers"]:
            x = layer(x, angles)
        return self.model["norm"](x)


def picture_positions(tokens, image_token, rows, columns):
    """M-RoPE positions [L, 3] of a text whose runs of `image_token` are pictures of `rows` by `columns` squares."""
    positions, following, at = [], 0, 0
    while at < len(tokens):
        if tokens[at] == image_token:
            positions += [(following, following + y, following + x) for y in range(rows) for x in range(columns)]
            following += max(rows, columns)
            at += rows * columns
        else:
            positions.append((following,) * 3)
            following += 1
            at += 1
    return torch.tensor(positions)


def initialise(network, generator):
    """Normal weights of the variance 1 / inputs, biases 0.02 normal; norms stay at one."""
    for name, weight in network.named_parameters():
        if weight.dim() == 2:
            deviation = 1 / math.sqrt(weight.shape[1]) if "embed_tokens" not in name else 0.5
            nn.init.normal_(weight, std=deviation, generator=generator)
        elif name.endswith("bias") and "norm" not in name and "ln_q" not in name:
            nn.init.normal_(weight, std=0.02, generator=generator)
