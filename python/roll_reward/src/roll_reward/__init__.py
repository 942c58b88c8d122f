"""Rewards and environments in Python for roll.

    import roll_reward

    @roll_reward.differentiable              # torch.autograd does the rest
    def score(frames, prompt, reference):    # torch f32 [T, 3, H, W] in [-1, 1]
        return -(frames.mean() - 0.2) ** 2

    roll_reward.serve(score)

A score takes what it names of: `frames`, `prompt`, `fps`, `reference` (the reference's frames, or what `prepare` made of
them), `options` (the configuration's `reward.options`), `columns` (other columns of the row in the metadata) and `device`. It returns a number, a pair of it and a dict of
details, or `None` or `Missing("why")` where there is nothing to score. Without `@differentiable`, frames are NumPy arrays
where NumPy is installed, else `Array`s, and a gradient may be returned by hand in a `Score`.
"""

from .environment import environment
from .frame import Array, FrameError
from .reward import Missing, Score, differentiable, reward
from .serve import serve

__all__ = ["Array", "FrameError", "Missing", "Score", "differentiable", "environment", "reward", "serve"]
__version__ = "0.1.0"
