"""Writes the numbers that roll-algos/video/tests/unipc.rs compares with: diffusers' UniPC on a flow whose velocity is a formula.

The method is diffusers', the levels are those of Wan's official scheduler. Steps are taken in float64 on levels of
float32, so that what is compared is the method and not the rounding.

    pip install diffusers torch
    python tests/scripts/unipc_reference.py > roll-algos/video/tests/unipc.json
"""

import json

import diffusers
import numpy as np
import torch
from diffusers import UniPCMultistepScheduler

START = [0.9, -1.3, 0.2, -0.4, 2.1, 0.05]


def velocity(x, timestep):
    """The formula, which the test has too."""
    place = torch.arange(x.shape[-1], dtype=torch.float64)
    return torch.sin(2 * x + 0.3 * place) * (0.5 + timestep / 1000) - 0.2 * x


def official(steps, shift):
    """The levels of Wan's own scheduler, which end a little nearer to the data than those of diffusers."""
    levels = np.linspace(np.float32(0.999).item(), 0, steps + 1)[:-1]
    levels = shift * levels / (1 + (shift - 1) * levels)
    return levels, (levels * 1000).astype(np.int64)


def case(steps, shift):
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=2, solver_type="bh2"
    )
    scheduler.set_timesteps(steps)
    levels, timesteps = official(steps, shift)
    scheduler.sigmas = torch.from_numpy(np.append(levels, 0).astype(np.float32)).double()
    scheduler.timesteps = torch.from_numpy(timesteps)
    x, after = torch.tensor([[START]], dtype=torch.float64), []
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x, float(t)), t, x).prev_sample
        after.append(x[0, 0].tolist())
    return {
        "steps": steps,
        "shift": shift,
        "sigmas": scheduler.sigmas.tolist(),
        "timesteps": scheduler.timesteps.tolist(),
        "latents": after,
    }


cases = [case(1, 5.0), case(2, 5.0), case(3, 1.0), case(8, 5.0), case(20, 12.0), case(40, 5.0)]
text = json.dumps({"diffusers": diffusers.__version__, "start": START, "cases": cases})
print(text.replace('{"steps"', '\n{"steps"'))
