"""Writes attention.pt: ATen's fused kernels of attention, called as functions of a TorchScript module.

    python roll-backends/src/ops/libtorch/attention.py      # with any PyTorch from 2.9 on

tch binds no forward function that returns the softmax statistics that the backward functions take. Tensors are
`[1, heads, rows, d]`; `none` is an undefined tensor. Without dropout the kernels read no random state.
"""

import pathlib

import torch

CODE = """
def flash(self, q, k, v, causal: bool, scale: float):
    found = torch._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]

def flash_backward(self, d_out, q, k, v, out, statistics, none, causal: bool, scale: float):
    state = torch.zeros([], dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, statistics, none, none, q.size(2), k.size(2), 0.0, causal, state, state, scale=scale)

def cudnn(self, q, k, v, causal: bool, scale: float):
    found = torch._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return found[0], found[1]

def cudnn_backward(self, d_out, q, k, v, out, statistics, none, causal: bool, scale: float):
    state = torch.zeros([], dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, statistics, state, state, none, none, none, q.size(2), k.size(2), 0.0, causal, scale=scale)

def efficient(self, q, k, v, causal: bool, scale: float):
    found = torch._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return found[0], found[1]

def efficient_backward(self, d_out, q, k, v, out, statistics, none, causal: bool, scale: float):
    state = torch.zeros([], dtype=torch.int64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, none, out, statistics, state, state, 0.0, [True, True, True, False], causal, scale=scale)
    return found[0], found[1], found[2]

def cpu(self, q, k, v, causal: bool, scale: float):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

def cpu_backward(self, d_out, q, k, v, out, statistics, none, causal: bool, scale: float):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, statistics, 0.0, causal, scale=scale)
"""

module = torch.jit.ScriptModule()
module.define(CODE)
module.save(str(pathlib.Path(__file__).with_suffix(".pt")))
