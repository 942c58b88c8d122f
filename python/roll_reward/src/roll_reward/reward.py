"""A function as a reward: what it takes, what it returns, and its gradient."""

import inspect
import math
import traceback

from .frame import Array, as_array

#: What a score may take.
KNOWN = ("frames", "prompt", "reference", "fps", "options", "columns", "device")


class Missing:
    """There is nothing to score, and why. From `prepare`: the reference shows nothing to compare with."""

    def __init__(self, reason="it gave no reason"):
        self.reason = str(reason)


class Score:
    """A score with details, and with the gradient in the frames where that is known by hand."""

    def __init__(self, value, details=None, gradient=None):
        self.value, self.details, self.gradient = value, details or {}, gradient


class Reward:
    """A score function with what goes with it."""

    def __init__(self, score, prepare=None, name=None, differentiable=False, torch=False):
        self.function, self.preparation = score, prepare
        self.name = name or getattr(score, "__name__", "python")
        self.differentiable, self.torch = differentiable, torch
        self.wanted = _parameters(score)
        #: Whether the score depends on the reference; roll trains on rows without a clip only if no reward's does.
        self.reads_reference = prepare is not None or "reference" in self.wanted
        #: Whether the function takes several samples at once; set by `serve(batch=...)`.
        self.together = False

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def prepare(self, header, tensors, device=None):
        """The answer to `prepare`: a body and tensors."""
        frames = tensors["frames"]
        if self.preparation is None:
            # The whole reference is the target where the score takes one.
            return {}, [("reference", frames)] if "reference" in self.wanted else []
        given = {"frames": self._given(frames, device), "fps": header.get("fps"), "options": header["options"], "device": device}
        prepared = self.preparation(**{k: v for k, v in given.items() if k in _parameters(self.preparation)})
        if prepared is None or isinstance(prepared, Missing):
            return {"target": None, "reason": (prepared or Missing()).reason}, []
        if isinstance(prepared, dict):
            return {}, list(prepared.items())
        return {}, [("reference", prepared)]

    def reference(self, tensors, device):
        """What the score gets as `reference`."""
        target = {k[len("target/") :]: self._given(v, device) for k, v in tensors.items() if k.startswith("target/")}
        return target["reference"] if list(target) == ["reference"] else target

    def score(self, calls, device=None):
        """The answers to several `score` calls of frames of one shape: a body and tensors for each."""
        record = self.differentiable and any(header.get("record") for header, _ in calls)
        frames = [self._given(tensors["frames"], device) for _, tensors in calls]
        if self.torch and record:
            frames = [f.requires_grad_() for f in frames]
        given = {
            "frames": frames,
            "prompt": [header.get("prompt", "") for header, _ in calls],
            "fps": [header.get("fps") for header, _ in calls],
            "options": [header["options"] for header, _ in calls],
            "columns": [header.get("columns", {}) for header, _ in calls],
            "reference": [self.reference(tensors, device) for _, tensors in calls],
            "device": [device for _ in calls],
        }
        import contextlib

        guard = contextlib.nullcontext()
        if self.torch and not record:
            import torch

            guard = torch.no_grad()
        with guard:
            if self.together:
                if self.torch:
                    import torch

                    given["frames"] = torch.stack(frames)
                given["options"], given["device"] = given["options"][0], device
                results = list(self.function(**{k: given[k] for k in self.wanted}))
                if len(results) != len(calls):
                    raise ValueError(f"the score gave {len(results)} values for {len(calls)} samples")
            else:
                results = [self.function(**{k: given[k][i] for k in self.wanted}) for i in range(len(calls))]
        scores = [_as_score(result) for result in results]
        if self.torch and record:
            self._differentiate(scores, frames)
        return [self._answer(score, header, f) for score, (header, _), f in zip(scores, calls, frames)]

    def _differentiate(self, scores, frames):
        """Fills in the gradients: of the sum, since a score depends on its own frames alone."""
        import torch

        values = [(s, f) for s, f in zip(scores, frames) if isinstance(s, Score) and math.isfinite(_number(s))]
        for score, _ in values:
            if not (hasattr(score.value, "requires_grad") and score.value.requires_grad):
                raise ValueError(
                    f"the score {score.value!r} does not depend on the frames by way of PyTorch: it has no gradient. "
                    "Leave out @differentiable, or compute it without .item(), .detach() or NumPy"
                )
        if values:
            total = sum(s.value.sum() for s, _ in values)
            gradients = torch.autograd.grad(total, [f for _, f in values], allow_unused=True)
            for (score, f), gradient in zip(values, gradients):
                score.gradient = torch.zeros_like(f) if gradient is None else gradient.to(torch.float32)

    def _answer(self, score, header, frames):
        if isinstance(score, Missing):
            return {"score": None, "reason": score.reason}, []
        value = _number(score)
        if not math.isfinite(value):
            # JSON has no such number. It counts as nothing to score, with a warning.
            return {"score": "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"}, []
        details = {}
        for key, detail in score.details.items():
            detail = float(detail)
            if math.isfinite(detail):  # JSON has no NaN
                details[str(key)] = detail
        body, tensors = {"score": value, "details": details}, []
        if header.get("record") and self.differentiable:
            if score.gradient is None:
                raise ValueError("a gradient is wanted, and the score gave none: return roll_reward.Score(value, gradient=...)")
            if self.torch and hasattr(score.gradient, "detach"):
                return body, [("gradient", score.gradient.to(dtype=frames.dtype).reshape(frames.shape))]
            gradient = as_array(score.gradient)
            tensors = [("gradient", Array(gradient.data, gradient.dtype, list(frames.shape)))]
        return body, tensors

    def _given(self, array, device):
        if self.torch:
            tensor = array.torch()
            return tensor.to(device) if device else tensor
        try:
            return array.numpy()
        except ImportError:
            return array


def _number(score):
    return float(score.value.item() if hasattr(score.value, "item") else score.value)


def _parameters(function):
    """What `function` takes of KNOWN; every other parameter needs a default."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return list(KNOWN)
        if name in KNOWN:
            names.append(name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise TypeError(f"{getattr(function, '__name__', function)} takes `{name}`; a score may take {', '.join(KNOWN)}")
    return names


def _as_score(result):
    if isinstance(result, (Score, Missing)):
        return result
    if result is None:
        return Missing()
    if isinstance(result, tuple):
        value, details = result
        return Missing() if value is None else Score(value, details)
    return Score(result)


def differentiable(score=None, *, prepare=None, name=None):
    """A score of PyTorch tensors, whose gradient torch.autograd computes. `prepare(frames)` makes of the reference what
    the score gets as `reference`: a tensor, or a dict of tensors."""
    make = lambda function: Reward(function, prepare, name, differentiable=True, torch=True)
    return make if score is None else make(score)


def reward(score=None, *, prepare=None, name=None, differentiable=False, torch=False):
    """A score of NumPy arrays (or `Array`s, or with `torch` PyTorch tensors). With `differentiable` it returns a `Score` with the gradient."""
    make = lambda function: Reward(function, prepare, name, differentiable, torch)
    return make if score is None else make(score)


def explained(error):
    """The error in a line, and the traceback below this package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/roll_reward/" not in f.filename.replace("\\", "/")]
    last = frames[-1] if frames else None
    place = f" ({last.filename}, line {last.lineno}, in {last.name})" if last else ""
    return f"{type(error).__name__}: {error}{place}"
