"""A reward of PyTorch tensors: torch.autograd does the rest. Needs torch and `pip install ./python/roll_reward`.

    roll rewards try command clip.mp4 --set 'reward.command=[python3, examples/reward_python/score.py]'
"""

import roll_reward


@roll_reward.differentiable
def score(frames, prompt, options):
    """Near a level of brightness, and smooth in time. frames: f32 [T, 3, H, W] in [-1, 1]."""
    level = -((frames.mean() - options.get("level", 0.2)) ** 2)
    smooth = -(frames[1:] - frames[:-1]).abs().mean() if len(frames) > 1 else 0 * level
    return level + 0.1 * smooth, {"level": level.item(), "smooth": smooth.item()}


if __name__ == "__main__":
    roll_reward.serve(score)
