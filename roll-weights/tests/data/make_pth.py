"""Writes the torch checkpoints that the tests of weight files read: python make_pth.py (with PyTorch 2.9)."""

import collections
import os
import torch


class Evil:
    def __reduce__(self):
        return (os.system, ("echo executed > /tmp/roll_pickle_was_executed",))


here = os.path.dirname(os.path.abspath(__file__))
base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
weights = collections.OrderedDict(
    a=base,
    transposed=base.t(),
    half=base.to(torch.float16),
    brain=base.to(torch.bfloat16),
    long=torch.tensor([1, -2, 3]),
    scalar=torch.tensor(2.5),
)
torch.save({"state_dict": {"net": weights}, "step": 7, "note": "plain values are fine"}, f"{here}/nested.pth")
torch.save(weights, f"{here}/legacy.pth", _use_new_zipfile_serialization=False)
torch.save({"a": base, "hook": Evil()}, f"{here}/evil.pth")
torch.save({"a": base, "double": base.double()}, f"{here}/double.pth")
