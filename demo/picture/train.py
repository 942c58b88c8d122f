"""Trains the small Z-Image of the picture demo, and the scorers of its reward and check, on portraits of the demo's people.

    demo-world --out target/portraits portraits
    python demo/picture/train.py vae target/portraits target/picture
    python demo/picture/train.py model target/portraits target/picture
    python demo/picture/train.py scorer target/portraits target/picture/scorer --seed 1
    python demo/picture/train.py scorer target/portraits target/picture/scorer_check --seed 2
    python demo/picture/train.py attributes target/portraits target/attributes.pt --pictures runs/picture

`vae` and `model` write a diffusers directory of Z-Image. `scorer` writes a CLIP. `attributes` trains a convolutional
network, which no run uses, to read style and colour of the hair, glasses and background, and reads them from the
pictures of a run. `vae` comes before `model`, which trains further when it is called again; the others need only the
portraits. Needs torch, diffusers, transformers, safetensors and Pillow.
"""

import argparse
import copy
import csv
import json
import math
import pathlib
import time

import numpy
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

SIDE = 64
# Channels of the latents, whose pixels are four pixels wide.
CHANNELS = 8
# Positions of a caption: Z-Image fills them up to multiples of 32.
TOKENS = 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ("user assistant a person with hair and no glasses background , short curly long tied black brown blond red white blue "
         "pink green grey yellow dark").split()
ATTRIBUTES = [["short", "curly", "long", "tied"], ["black", "brown", "blond", "red", "white", "blue", "pink"],
              ["no", "glasses"], ["blue", "green", "grey", "red", "yellow", "dark", "white"]]


def portraits(folder, column="prompt"):
    """Pictures u8 [portraits, 3, 64, 64], and their prompts."""
    rows = list(csv.DictReader((folder / "metadata.csv").open()))
    pictures = numpy.stack([numpy.asarray(Image.open(folder / row["image"]).convert("RGB")) for row in rows])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), [row[column] for row in rows]


def attributes(prompt):
    """Indices of style, colour, glasses and background."""
    words = prompt.replace(",", "").split()
    named = [words[3], words[4], "no" if "no" in words else "glasses", words[-2]]
    return [names.index(word) for names, word in zip(ATTRIBUTES, named)]


def vocabulary():
    return {word: i for i, word in enumerate(["[UNK]", *WORDS])}


def tokenizer(clip=False):
    """A `tokenizer.json` of whole words. CLIP's texts end with a special token; Z-Image's have a chat template."""
    vocab = vocabulary()
    added = [{"id": len(vocab) + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, token in enumerate(SPECIAL)]
    start, end = len(vocab) + 1, len(vocab) + 2
    ends = {"type": "RobertaProcessing", "cls": [SPECIAL[1], start], "sep": [SPECIAL[2], end], "trim_offsets": False,
            "add_prefix_space": False} if clip else None
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": ends,
            "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}


def tokens(prompts):
    """Ids of each prompt's words."""
    vocab = vocabulary()
    return [[vocab[word] for word in prompt.replace(",", " ,").split()] for prompt in prompts]


def templated(prompt):
    vocab, first = vocabulary(), len(WORDS) + 1
    return [first + 1, vocab["user"], *tokens([prompt])[0], first + 2, first + 1, vocab["assistant"]]


class Muon(torch.optim.Optimizer):
    """Updates with orthogonal matrices (Jordan et al. 2024): the momentum, orthogonalised by five Newton-Schulz steps."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                # The last layer of the text encoder does not take part.
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                x = parameter.grad.lerp(momentum, 0.95).reshape(len(parameter), -1)
                rows, columns = x.shape
                x = ((x.T if rows > columns else x) / (x.norm() + 1e-12)).bfloat16()
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = x.T if rows > columns else x
                parameter.add_(x.reshape(parameter.shape), alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


class Schedule:
    """A learning rate that rises over 50 updates and falls to zero at the end of the time."""

    def __init__(self, parameters, rate, minutes, muon=None):
        """With `muon`, its rate, Muon trains the matrices."""
        of_muon = [p for p in parameters if p.dim() > 1] if muon else []
        of_adam = [p for p in parameters if not (muon and p.dim() > 1)]
        self.optimizers = [(torch.optim.AdamW(of_adam, lr=rate, betas=(0.9, 0.98), weight_decay=0.01), rate)]
        if muon:
            self.optimizers.append((Muon(of_muon, muon), muon))
        self.parameters, self.minutes, self.updates, self.start = parameters, minutes, 0, time.time()
        self.mean = None

    def done(self):
        return (time.time() - self.start) / 60 / self.minutes

    def step(self, loss, note="", copies=None):
        """Updates the weights by the gradient of `loss`, which is that of their `copies` if there are any."""
        loss.backward()
        for parameter, copied in zip(self.parameters, copies or []):
            parameter.grad = None if copied.grad is None else copied.grad.float()
            copied.grad = None
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, rate in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate * min(1, (self.updates + 1) / 50) * max(0.0, 1 - self.done())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for parameter, copied in zip(self.parameters, copies or []):
                copied.copy_(parameter)
        self.updates += 1
        self.mean = loss.item() if self.mean is None else 0.98 * self.mean + 0.02 * loss.item()
        if self.updates % 100 == 0:
            print(f"{self.updates} updates, {60 * self.minutes * self.done():.0f} s, loss {self.mean:.4f} {note}", flush=True)


def drawn(count, size, generator):
    return torch.randint(count, (size,), generator=generator)


def write_json(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=2) + "\n")


def save_state(path, network, dtype):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.detach().to(dtype).contiguous() for name, weight in network.state_dict().items()}, path)


def face_weights():
    """Weights of the pixels [64, 64]: eyes, glasses and mouth count three times."""
    weights = torch.ones(SIDE, SIDE)
    weights[20:46, 18:46] = 3.0
    return weights / weights.mean()


def picture_loss(decoded, x, w):
    """Absolute and squared differences of pixels with weights w, and differences of their edges."""
    error = decoded - x
    edges = sum((w.narrow(d, 1, w.shape[d] - 1) * error.diff(dim=d).abs()).mean() for d in (-2, -1))
    return (w * error.abs()).mean() + 2 * (w * error.square()).mean() + edges


def psnr(decoded, x):
    return 10 * math.log10(4 / (decoded - x).square().mean().item())


def train_vae(arguments, generator):
    from diffusers import AutoencoderKL
    vae = AutoencoderKL(down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3,
                        block_out_channels=[16, 32, 64], layers_per_block=1, latent_channels=CHANNELS, norm_num_groups=8,
                        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=True, sample_size=SIDE,
                        scaling_factor=1.0, shift_factor=0.0).to(memory_format=torch.channels_last)
    pictures, _ = portraits(arguments.portraits)
    weights = face_weights()
    schedule = Schedule(list(vae.parameters()), 2e-3, arguments.minutes, muon=0.02)
    while schedule.done() < 1:
        x = pictures[drawn(len(pictures), 16, generator)].float() / 127.5 - 1
        w = weights
        if schedule.done() < 0.8:
            top, left = torch.randint(0, 33, (2,), generator=generator).tolist()
            x, w = (values[..., top:top + 32, left:left + 32] for values in (x, w))
        with torch.autocast("cpu", torch.bfloat16, enabled=schedule.done() < 0.9):
            code = vae.encode(x.contiguous(memory_format=torch.channels_last)).latent_dist
            decoded = vae.decode(code.sample(generator)).sample
        decoded = decoded.float()
        loss = picture_loss(decoded, x, w) + 1e-5 * code.kl().float().mean()
        schedule.step(loss, f"PSNR {psnr(decoded, x):.1f}")
    vae.eval()
    x = pictures[:512].float() / 127.5 - 1
    with torch.no_grad():
        means = torch.cat([vae.encode(part).latent_dist.mean for part in x.split(64)])
        decoded = torch.cat([vae.decode(part).sample for part in means.split(64)])
    shift, scale = float(means.mean()), float(1 / means.std())
    print(f"PSNR {psnr(decoded, x):.1f} dB, shift {shift:.4f}, scale {scale:.4f}")
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    vae.save_config(arguments.out / "vae")
    save_state(arguments.out / "vae/diffusion_pytorch_model.safetensors", vae.to(memory_format=torch.contiguous_format),
               torch.float16)


def build_model():
    from diffusers import ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM
    text = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(WORDS) + 1 + len(SPECIAL), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=512,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, initializer_range=0.1))
    dit = ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=CHANNELS, dim=128, n_layers=5, n_refiner_layers=1,
        n_heads=4, n_kv_heads=4, norm_eps=1e-5, qk_norm=True, cap_feat_dim=64, rope_theta=256.0, t_scale=1000.0,
        axes_dims=[8, 12, 12], axes_lens=[1536, 512, 512])
    return text, dit


def features(text, prompts):
    """Features of each prompt [prompts, 32, 64], of the states before the last layer, and which of them are fillers."""
    ids = [templated(prompt) for prompt in prompts]
    mask = torch.tensor([[1] * len(row) + [0] * (TOKENS - len(row)) for row in ids])
    padded = torch.tensor([row + [0] * (TOKENS - len(row)) for row in ids])
    return text(padded, attention_mask=mask, output_hidden_states=True).hidden_states[-2], mask == 0


class Attention:
    """The attention of diffusers' `ZSingleStreamAttnProcessor`, with fewer and faster operations on a CPU in bf16."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, freqs_cis=None):
        n, length, dim = hidden_states.shape
        projection = torch.cat([attn.to_q.weight, attn.to_k.weight, attn.to_v.weight])
        q, k, v = F.linear(hidden_states, projection).view(n, length, 3, attn.heads, -1).unbind(2)
        cosine = freqs_cis.real.repeat_interleave(2, -1)[:, :, None].to(q.dtype)
        sine = torch.stack([-freqs_cis.imag, freqs_cis.imag], -1).flatten(-2)[:, :, None].to(q.dtype)

        def turned(x):
            return x * cosine + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sine

        q, k, v = (x.transpose(1, 2) for x in (turned(attn.norm_q(q)), turned(attn.norm_k(k)), v))
        seen = (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).softmax(-1) @ v
        return attn.to_out[0](seen.transpose(1, 2).reshape(n, length, dim))


def velocity(dit, noisy, sigma, captions, fillers):
    """The transformer's output for `noisy` [pictures, channels, height, width].

    What its own `forward` computes, picture by picture, for pictures of one size and captions of at most `TOKENS`.
    """
    n, c, h, w = noisy.shape
    level = dit.t_embedder((1 - sigma) * dit.t_scale)
    patches = noisy.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(n, h * w // 4, 4 * c)
    rows, columns = (grid.flatten() for grid in torch.meshgrid(torch.arange(h // 2), torch.arange(w // 2), indexing="ij"))
    x_turns = dit.rope_embedder(torch.stack([torch.full_like(rows, TOKENS + 1), rows, columns], 1))[None]
    words = torch.arange(1, TOKENS + 1)
    caption_turns = dit.rope_embedder(torch.stack([words, 0 * words, 0 * words], 1))[None]
    x = dit.all_x_embedder["2-1"](patches)
    for layer in dit.noise_refiner:
        x = layer(x, None, x_turns, level)
    captions = torch.where(fillers[..., None], dit.cap_pad_token, dit.cap_embedder(captions))
    for layer in dit.context_refiner:
        captions = layer(captions, None, caption_turns)
    both, turns = torch.cat([x, captions], 1), torch.cat([x_turns, caption_turns], 1)
    for layer in dit.layers:
        both = layer(both, None, turns, level)
    patches = dit.all_final_layer["2-1"](both, c=level)[:, :h * w // 4]
    return patches.view(n, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


def train_model(arguments, generator):
    from diffusers import AutoencoderKL
    pictures, prompts = portraits(arguments.portraits, "carelessly")
    vae = AutoencoderKL.from_pretrained(arguments.out / "vae")
    with torch.no_grad():
        latents = torch.cat([vae.encode(part.float() / 127.5 - 1).latent_dist.mean for part in pictures.split(64)])
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    text, dit = build_model()
    # A second call trains the first one's networks further.
    if (arguments.out / "transformer").exists():
        text = type(text).from_pretrained(arguments.out / "text_encoder").float()
        dit = type(dit).from_pretrained(arguments.out / "transformer").float()
    for block in [*dit.noise_refiner, *dit.context_refiner, *dit.layers]:
        block.attention.processor = Attention()
    # Values are computed in bf16 by copies, whose gradients update the weights in f32.
    text_bf16, dit_bf16 = (copy.deepcopy(network).bfloat16() for network in (text, dit))
    parameters, copies = ([*t.parameters(), *d.parameters()] for t, d in ((text, dit), (text_bf16, dit_bf16)))
    print(f"{sum(p.numel() for p in dit.parameters())} weights of the transformer", flush=True)
    schedule = Schedule(parameters, 2e-3, arguments.minutes, muon=0.02)
    while schedule.done() < 1:
        chosen = drawn(len(latents), 16, generator)
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        # The levels of a schedule with shift 3.
        sigma = torch.rand(len(clean), generator=generator)
        sigma = 3 * sigma / (1 + 2 * sigma)
        s = sigma.view(-1, 1, 1, 1)
        noisy = ((1 - s) * clean + s * noise).bfloat16()
        raw = velocity(dit_bf16, noisy, sigma, *features(text_bf16, [prompts[i] for i in chosen]))
        schedule.step(F.mse_loss(raw.float(), clean - noise), copies=copies)
    out = arguments.out
    dit.save_config(out / "transformer")
    save_state(out / "transformer/diffusion_pytorch_model.safetensors", dit, torch.bfloat16)
    text.config.save_pretrained(out / "text_encoder")
    state = {name: weight for name, weight in text.state_dict().items() if name != "lm_head.weight"}
    save_file({name: weight.to(torch.bfloat16).contiguous() for name, weight in state.items()},
              out / "text_encoder/model.safetensors")
    config = json.loads((out / "text_encoder/config.json").read_text())
    write_json(out / "text_encoder/config.json",
               config | {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "torch_dtype": "bfloat16"})
    write_json(out / "tokenizer/tokenizer.json", tokenizer())
    template = ("{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
                "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}")
    write_json(out / "tokenizer/tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "padding_side": "right", "chat_template": template})
    write_json(out / "scheduler/scheduler_config.json", {
        "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0,
        "use_dynamic_shifting": False})
    write_json(out / "model_index.json", {
        "_class_name": "ZImagePipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]})


def augmented(pictures, generator):
    """Shifted, brightened, some blurred and noisy, as the VAE's pictures are; [0, 1]."""
    x = pictures.float() / 255
    shift = torch.randint(-3, 4, (2,), generator=generator).tolist()
    x = F.pad(x, (3, 3, 3, 3), mode="replicate")[:, :, 3 + shift[0]:3 + shift[0] + SIDE, 3 + shift[1]:3 + shift[1] + SIDE]
    weight = torch.rand(len(x), 1, 1, 1, generator=generator)
    blurred = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    gain = 1 + 0.05 * torch.randn(len(x), 1, 1, 1, generator=generator)
    noise = 0.04 * torch.rand(len(x), 1, 1, 1, generator=generator) * torch.randn(x.shape, generator=generator)
    return ((x * (1 - weight) + blurred * weight) * gain + noise).clamp(0, 1)


def train_scorer(arguments, generator):
    from transformers import CLIPConfig, CLIPModel
    end = len(WORDS) + 3
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    clip = CLIPModel(CLIPConfig(
        projection_dim=32,
        text_config=sizes | {"num_hidden_layers": 2, "vocab_size": end + 1, "max_position_embeddings": 24,
                             "bos_token_id": end - 1, "eos_token_id": end},
        vision_config=sizes | {"num_hidden_layers": 3, "image_size": SIDE, "patch_size": 8}))
    pictures, prompts = portraits(arguments.portraits)
    rows = [[end - 1, *row, end] for row in tokens(prompts)]
    longest = max(map(len, rows))
    # Fillers follow the end token, which causal attention keeps from seeing them.
    ids = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
    mean, std = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25)
    labels = torch.tensor([attributes(prompt) for prompt in prompts])
    schedule = Schedule(list(clip.parameters()), 2e-3, arguments.minutes, muon=0.02)
    while schedule.done() < 1:
        chosen = drawn(len(pictures), 64, generator)
        x = (augmented(pictures[chosen], generator) - mean) / std
        logits = clip(input_ids=ids[chosen], pixel_values=x).logits_per_image
        # Portraits of one description are equally right.
        same = (labels[chosen][:, None] == labels[chosen][None]).all(-1).float()
        target = same / same.sum(1, keepdim=True)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        schedule.step(loss)
    write_json(arguments.out / "config.json", json.loads(clip.config.to_json_string(use_diff=False)))
    save_state(arguments.out / "model.safetensors", clip, torch.bfloat16)
    write_json(arguments.out / "tokenizer.json", tokenizer(clip=True))
    write_json(arguments.out / "preprocessor_config.json", {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": SIDE},
        "do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE}, "do_normalize": True, "do_rescale": True,
        "do_convert_rgb": True, "rescale_factor": 1 / 255, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.25] * 3})


class Attributes(torch.nn.Module):
    """Logits of every attribute of a picture in [0, 1]."""

    def __init__(self):
        super().__init__()
        widths = [3, 16, 32, 48, 64]
        layers = []
        for inner, outer in zip(widths, widths[1:]):
            layers += [torch.nn.Conv2d(inner, outer, 3, 2, 1), torch.nn.GroupNorm(8, outer), torch.nn.SiLU()]
        self.body = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(64 * 16, 64), torch.nn.SiLU())
        self.heads = torch.nn.ModuleList([torch.nn.Linear(64, len(names)) for names in ATTRIBUTES])

    def forward(self, x):
        states = self.body(2 * x - 1)
        return [head(states) for head in self.heads]


def right(network, pictures, prompts):
    """Whether each attribute is right [pictures, 4]."""
    truth = torch.tensor([attributes(prompt) for prompt in prompts])
    with torch.no_grad():
        return torch.stack([logits.argmax(-1) for logits in network(pictures.float() / 255)], 1) == truth


def train_attributes(arguments, generator):
    network = Attributes()
    if arguments.out.exists():
        network.load_state_dict(torch.load(arguments.out))
    else:
        pictures, prompts = portraits(arguments.portraits)
        labels = torch.tensor([attributes(prompt) for prompt in prompts])
        schedule = Schedule(list(network.parameters()), 2e-3, arguments.minutes)
        while schedule.done() < 1:
            chosen = 400 + drawn(len(pictures) - 400, 64, generator)
            logits = network(augmented(pictures[chosen], generator))
            schedule.step(sum(F.cross_entropy(part, labels[chosen][:, i]) for i, part in enumerate(logits)))
        print("right on 400 portraits of other people:", right(network, pictures[:400], prompts[:400]).float().mean(0).tolist())
        torch.save(network.state_dict(), arguments.out)
    if arguments.pictures is None:
        return
    rights = {}
    unseen = (arguments.portraits / "unseen.txt").read_text().splitlines()
    for part in ("before", "after"):
        files = sorted((arguments.pictures / "samples" / part).glob("unseen-*.png"))
        shown = torch.stack([torch.from_numpy(numpy.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) for file in files])
        prompts = [unseen[int(file.stem.split("-")[1])] for file in files]
        rights[part] = right(network, shown, prompts).float()
        print(part, len(files), "pictures; right: style, colour, glasses, background, mean:",
              [round(float(v), 3) for v in [*rights[part].mean(0), rights[part].mean()]])
    change = (rights["after"] - rights["before"]).mean(1)
    print(f"{change.mean():+.3f} (95 % {1.96 * change.std() / math.sqrt(len(change)):.3f} to either side)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"vae": (train_vae, 13), "model": (train_model, 30), "scorer": (train_scorer, 1.1),
             "attributes": (train_attributes, 0.5)}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("portraits", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=pathlib.Path, help="a run whose pictures are read")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    train, minutes = kinds[arguments.what]
    arguments.minutes = arguments.minutes or minutes
    train(arguments, torch.Generator().manual_seed(arguments.seed))


if __name__ == "__main__":
    main()
