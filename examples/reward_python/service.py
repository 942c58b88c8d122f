"""A service as VideoAlign or HPSv3 would be: a model on each GPU that rates quality, motion and fit to the prompt.

    python3 examples/reward_python/service.py --http 8000 [--host 0.0.0.0 --token-env REWARD_TOKEN]
    roll rewards try http clip.mp4 --set reward.url=http://127.0.0.1:8000

`load` is where your model goes; a small random network stands in for it. Needs torch and `pip install
./python/roll_reward`.
"""

import functools

import roll_reward
import torch


@functools.lru_cache(None)
def load(device):
    """The model of a device, loaded once. Nothing else is kept between calls."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv3d(3, 8, 3, stride=2, padding=1), torch.nn.GELU(), torch.nn.Conv3d(8, 3, 3))
    return layers.to(device or "cpu").requires_grad_(False)


@roll_reward.differentiable(name="video_align")
def score(frames, prompt, device):
    """frames: [N, T, 3, H, W], N videos that were asked for at the same time; prompt: N texts."""
    small = torch.nn.functional.interpolate(frames.transpose(1, 2), size=(8, 64, 64), mode="trilinear")
    rated = load(device)(small).mean((2, 3, 4))  # [N, 3]
    for quality, motion, fit in rated:
        details = {"quality": quality.item(), "motion": motion.item(), "fit": fit.item()}
        yield quality + motion + fit, details


if __name__ == "__main__":
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    roll_reward.serve(score, devices=gpus or None, batch=4)
