#!/usr/bin/env python3
"""Writes strides.pth and deflated.pth: small torch checkpoints whose tensors are large. Standard library only: `torch` is
a stand-in with the names that a pickle of tensors has.

    python3 roll-weights/tests/data/make_hostile_pth.py
"""

import collections
import io
import pickle
import sys
import types
import zipfile
from pathlib import Path

HERE = Path(__file__).parent


def stand_in(module, name):
    made = type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, made)
    return made


sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch._utils"] = types.ModuleType("torch._utils")
FLOATS = stand_in("torch", "FloatStorage")


def _rebuild_tensor_v2(*_):
    raise RuntimeError("only its name is written")


_rebuild_tensor_v2.__module__ = "torch._utils"
sys.modules["torch._utils"]._rebuild_tensor_v2 = _rebuild_tensor_v2


class Storage:
    def __init__(self, count):
        self.count = count


class Tensor:
    def __init__(self, storage, shape, strides):
        self.all = (storage, 0, shape, strides, False, collections.OrderedDict())

    def __reduce__(self):
        return _rebuild_tensor_v2, self.all


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        if isinstance(value, Storage):
            return ("storage", FLOATS, "0", "cpu", value.count)
        return None


def write(name, tensors, storage, compression):
    out = io.BytesIO()
    Pickler(out, protocol=2).dump(tensors)
    with zipfile.ZipFile(HERE / name, "w", compression, compresslevel=9) as file:
        # A time that is always the same: so is the file.
        for member, content in [("data.pkl", out.getvalue()), ("byteorder", b"little"), ("data/0", storage), ("version", b"3\n")]:
            file.writestr(zipfile.ZipInfo("archive/" + member, (2026, 1, 1, 0, 0, 0)), content, compression, 9)


four = Storage(4)
write("strides.pth", {f"t{i}": Tensor(four, (200_000_000,), (0,)) for i in range(40)}, bytes(16), zipfile.ZIP_STORED)
count = 18_000_000
write("deflated.pth", {"t": Tensor(Storage(count), (count,), (1,))}, bytes(4 * count), zipfile.ZIP_DEFLATED)
