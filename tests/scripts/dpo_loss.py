#!/usr/bin/env python3
"""Writes tests/fixtures/dpo_loss/config.json: losses and metrics of DPO by the formulas of TRL, in float64.

    python3 tests/scripts/dpo_loss.py > tests/fixtures/dpo_loss/config.json

Needs numpy alone. The formulas are those of DPOTrainer (loss types sigmoid, with label smoothing, and ipo, which averages
over tokens) and of CPOTrainer (loss type simpo, which is sigmoid_norm without a reference and with a margin) of TRL. They
are written here from log-probabilities of tokens on, with the names of TRL's options. Gradients are complex-step
derivatives of the mean loss in the log-probability of each answer.
"""

import json

import numpy as np

SEED = 9101
PAIRS = 6
# TRL's options, and the same in ours.
CASES = [
    ({"loss_type": "sigmoid", "beta": 0.1}, {"beta": 0.1}),
    ({"loss_type": "sigmoid", "beta": 0.5, "label_smoothing": 0.15}, {"beta": 0.5, "label_smoothing": 0.15}),
    ({"loss_type": "sigmoid", "beta": 0.1, "reference_free": True}, {"beta": 0.1, "reference_free": True}),
    ({"loss_type": "sigmoid_norm", "beta": 2.0}, {"beta": 2.0, "length_normalised": True}),
    ({"loss_type": "ipo", "beta": 0.1}, {"beta": 0.1, "ipo": True}),
    ({"loss_type": "ipo", "beta": 0.7}, {"beta": 0.7, "ipo": True}),
    ({"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
     {"beta": 2.0, "margin": 0.5, "length_normalised": True, "reference_free": True}),
    ({"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.0, "label_smoothing": 0.1},
     {"beta": 2.5, "margin": 1.0, "label_smoothing": 0.1, "length_normalised": True, "reference_free": True}),
]


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def losses(options, logps, ref_logps, lengths):
    """The loss of each pair, and the rewards of chosen and rejected answers. Arrays are [2, pairs]."""
    kind, beta, smoothing = options["loss_type"], options["beta"], options.get("label_smoothing", 0.0)
    if kind == "simpo" or options.get("reference_free"):
        ref_logps = np.zeros_like(ref_logps)
    scores = logps - ref_logps
    if kind in ("simpo", "sigmoid_norm", "ipo"):
        scores = scores / lengths
    logits = scores[0] - scores[1]
    rewards = beta * scores
    if kind == "ipo":
        return (logits - 1 / (2 * beta)) ** 2, rewards
    if kind == "simpo":
        logits = logits - options["simpo_gamma"] / beta
    value = -log_sigmoid(beta * logits) * (1 - smoothing) - log_sigmoid(-beta * logits) * smoothing
    return value, rewards


def main():
    random = np.random.default_rng(SEED)
    lengths = random.integers(1, 9, size=(2, PAIRS))
    draw = lambda: [[[-round(float(random.exponential(1.5)), 4) for _ in range(n)] for n in side] for side in lengths]
    policy, reference = draw(), draw()
    sums = lambda tokens: np.array([[sum(answer) for answer in side] for side in tokens])
    logps, ref_logps = sums(policy), sums(reference)
    cases = []
    for theirs, ours in CASES:
        values, rewards = losses(theirs, logps, ref_logps, lengths)
        gradient = np.zeros_like(logps)
        for at in np.ndindex(*logps.shape):
            moved = logps.astype(complex)
            moved[at] += 1e-30j
            gradient[at] = losses(theirs, moved, ref_logps, lengths)[0].mean().imag / 1e-30
        metrics = {
            "loss": values.mean(),
            "rewards/chosen": rewards[0].mean(),
            "rewards/rejected": rewards[1].mean(),
            "rewards/accuracies": (rewards[0] > rewards[1]).mean(),
            "rewards/margins": (rewards[0] - rewards[1]).mean(),
        }
        cases.append({"trl": theirs, "options": ours, "losses": values.tolist(), "gradient": gradient.tolist(),
                      "metrics": {name: float(value) for name, value in metrics.items()}})
    notes = [
        "policy and reference: log-probabilities of the tokens of each answer, [chosen or rejected, pairs, tokens]",
        "trl: options of TRL; options: the same in ours; losses: [pairs]",
        "gradient: of the mean loss in the log-probability of each answer, [chosen or rejected, pairs]; complex step",
        "ipo, sigmoid_norm and simpo divide log-probabilities by the number of tokens",
    ]
    source = "formulas of TRL's DPOTrainer and CPOTrainer, by tests/scripts/dpo_loss.py; numpy, float64"
    config = {"seed": SEED, "pairs": PAIRS, "policy": policy, "reference": reference, "cases": cases}
    print(json.dumps({"name": "dpo_loss", "source": source, "notes": notes, "config": config}, indent=1))


main()
