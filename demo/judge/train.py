"""Trains a tiny Qwen2-VL on the demo's world to answer questions with yes or no, for the reward `judge` with `local`.

    python demo/judge/train.py demo/assets/clips/train demo/assets/clips/unseen target/judge-vlm-1 --seed 1

reads the first folder's clips, reports accuracy on the second's, and writes a model directory (`config.json`,
`tokenizer.json`, `model.safetensors`). The answers follow from the clips' prompts. Needs torch 2.5 or later, safetensors,
and ffmpeg. The texts and the pictures are those that the judge shows: the first frame and the last.
"""

import argparse
import concurrent.futures
import csv
import json
import pathlib
import re
import subprocess
import sys
import time

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from torch_qwen_vl import QwenVl, config, initialise, picture_positions, to_patches

SIDE, FRAMES, PATCH = 64, 9, 8
# As the judge chooses 2 of 9 frames.
SHOWN = [0, FRAMES - 1]
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
# Questions, and the pattern of the prompts to which the answer is yes. Another question takes as many minutes more.
QUESTIONS = [("Is the light warm?", "warm light")]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]


def text(question):
    """The judge's chat, with one placeholder per picture."""
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    return ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n" + picture * len(SHOWN)
            + f"These are {len(SHOWN)} frames of one video, in their order. {question} "
            + "Answer with one word, yes or no.<|im_end|>\n<|im_start|>assistant\n")


def words(line):
    """Lower-case words and marks, and special tokens; as `tokenizer.json` divides a text."""
    return re.findall(r"<\|\w+\|>|\w+|[^\w\s]+", line.lower())


def vocabulary():
    asked = [word for question, *_ in QUESTIONS for word in words(text(question)) if word not in SPECIAL]
    return {word: i for i, word in enumerate(dict.fromkeys(["[UNK]", "yes", "no", *asked]))}


def tokenizer(vocab):
    added = [{"id": len(vocab) + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, token in enumerate(SPECIAL)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
            "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}


def frames_of(path):
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(FRAMES, SIDE, SIDE, 3)[SHOWN].permute(0, 3, 1, 2)


def clips_of(folder):
    """Shown frames u8 [clips, 2, 3, 64, 64], and prompts."""
    rows = list(csv.DictReader((folder / "metadata.csv").open()))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return torch.stack(list(pool.map(lambda row: frames_of(folder / row["video"]), rows))), [row["prompt"] for row in rows]


class Judge:
    def __init__(self, network, vocab):
        self.network, self.vocab = network, vocab | {token: len(vocab) + i for i, token in enumerate(SPECIAL)}
        self.squares = SIDE // PATCH // 2

    def tokens(self, question):
        ids = [self.vocab[word] for word in words(text(question))]
        image = self.vocab["<|image_pad|>"]
        return [id for id in ids for _ in range(self.squares ** 2 if id == image else 1)]

    def logits(self, pictures, question):
        """Logits of the answer [clips, vocabulary] for pictures in [0, 1], [clips, 2, 3, 64, 64]."""
        tokens = self.tokens(question)
        pixels = ((pictures - MEAN) / STD).flatten(0, 1)[:, None].expand(-1, 2, -1, -1, -1)
        features = self.network.visual(to_patches(pixels, PATCH), SIDE // PATCH, SIDE // PATCH)
        features = features.view(pictures.shape[0], -1, features.shape[-1])
        positions = picture_positions(tokens, self.vocab["<|image_pad|>"], self.squares, self.squares)
        states = self.network.read(torch.tensor(tokens), features, positions)[:, -1]
        return states @ self.network.model["embed_tokens"].weight.T


def augmented(pictures, generator):
    """One shift, mirror, brightness per clip; some are blurred and noisy, as the VAE's are."""
    clips = pictures.shape[0]
    shifts = torch.randint(-4, 5, (clips, 2), generator=generator).tolist()
    mirrored = (torch.rand(clips, generator=generator) < 0.5).tolist()
    moved = []
    for clip, shift, mirror in zip(pictures, shifts, mirrored):
        clip = torch.nn.functional.pad(clip, (4, 4, 4, 4), mode="replicate")
        clip = clip[:, :, 4 + shift[0]:4 + shift[0] + SIDE, 4 + shift[1]:4 + shift[1] + SIDE]
        moved.append(clip.flip(-1) if mirror else clip)
    pictures = torch.stack(moved)
    gains = 1 + 0.03 * torch.randn(clips, 1, 1, 1, 1, generator=generator)
    weight = torch.rand(clips, 1, 1, 1, 1, generator=generator)
    blurred = torch.nn.functional.avg_pool2d(pictures.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(pictures)
    noise = 0.03 * torch.rand(clips, 1, 1, 1, 1, generator=generator) * torch.randn(pictures.shape, generator=generator)
    return (pictures * gains * (1 - weight) + blurred * gains * weight + noise).clamp(0, 1)


def accuracy(judge, pictures, prompts, question, pattern):
    """Accuracy per answer: the mean of the shares of right answers among yes and among no."""
    truth = torch.tensor([pattern in prompt for prompt in prompts])
    with torch.no_grad():
        logits = torch.cat([judge.logits(part.float() / 255, question) for part in pictures.split(64)])
    gap = logits[:, judge.vocab["yes"]] - logits[:, judge.vocab["no"]]
    return float(((gap > 0) == truth)[truth].float().mean() + ((gap > 0) == truth)[~truth].float().mean()) / 2, gap


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=pathlib.Path)
    parser.add_argument("unseen", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    vocab = vocabulary()
    layout = config(len(vocab) + len(SPECIAL), 96, 2, 6, 2, 192, 64, 3, 4, PATCH, [2, 3, 3], len(vocab) + 3)
    network = QwenVl(layout)
    initialise(network, generator)
    torch.nn.init.normal_(network.model["embed_tokens"].weight, std=0.1, generator=generator)
    judge = Judge(network, vocab)
    pictures, prompts = clips_of(arguments.clips)
    unseen, unseen_prompts = clips_of(arguments.unseen)
    sides = {question: [[i for i, prompt in enumerate(prompts) if (pattern in prompt) == answer] for answer in (True, False)]
             for question, pattern in QUESTIONS}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.02, betas=(0.9, 0.98))
    start, step, means = time.time(), 0, {question: 0.7 for question, *_ in QUESTIONS}
    while (done := (time.time() - start) / 60 / arguments.minutes) < 1:
        question, _ = QUESTIONS[step % len(QUESTIONS)]
        chosen = [side[int(torch.randint(len(side), (1,), generator=generator))] for side in sides[question] for _ in range(16)]
        answers = torch.tensor([judge.vocab["yes"]] * 16 + [judge.vocab["no"]] * 16)
        logits = judge.logits(augmented(pictures[chosen].float() / 255, generator), question)
        loss = torch.nn.functional.cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 6e-4 * min(1, (step + 1) / 100) * max(0.02, 1 - done)
        optimizer.step()
        step, means[question] = step + 1, 0.95 * means[question] + 0.05 * loss.item()
        if step % 200 == 0:
            losses = ", ".join(f"{question.split()[-1]} {mean:.2f}" for question, mean in means.items())
            print(f"{step} updates, {(time.time() - start) / 60:.1f} min, losses: {losses}", flush=True)
    for question, pattern in QUESTIONS:
        print(f"{accuracy(judge, unseen, unseen_prompts, question, pattern)[0]:.3f}  {question}")
    _, gap = accuracy(judge, unseen, unseen_prompts, *QUESTIONS[0])
    print("P(yes), " + QUESTIONS[0][0], [(round(float(p), 4), QUESTIONS[0][1] in text) for p, text in zip(torch.sigmoid(gap), unseen_prompts)])
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "config.json").write_text(json.dumps(layout, indent=1))
    (arguments.out / "tokenizer.json").write_text(json.dumps(tokenizer(vocab), indent=1))
    save_file({name: weight.detach().contiguous() for name, weight in network.state_dict().items()},
              arguments.out / "model.safetensors")


if __name__ == "__main__":
    main()
