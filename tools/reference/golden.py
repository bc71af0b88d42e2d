#!/usr/bin/env python3
"""Golden logits and greedy tokens of tiny made checkpoints, by the float64 forward pass of `forward.py`.

usage: golden.py [OUT_DIR [FAMILY...]]        from the root of the repository     (needs: pip install gguf numpy, and cargo)

Makes each checkpoint with `cargo xtask make-model SHAPE FILE --type TYPE --seed SEED` in a temporary folder and writes
one JSON per checkpoint to OUT_DIR (default crates/dynalm/tests/golden):
  shape, type, seed   what makes the checkpoint
  sha256              of all tensors' decoded values (f32, in order): says whether a test has the same weights
  prompt              token ids, longer than the tiny shapes' sliding window
  positions           for each prompt position the five largest logits [[id, logit], ...] and the log-sum-exp of all
  last                all logits after the prompt
  greedy              32 tokens that follow, each the largest logit, and by how much it leads the second
  margin              of models with experts, the least distance of a router's last chosen logit from the next

A model with experts is made with the first seed whose margin is at least MARGIN: nearer than that, roundings could
choose another expert, and the numbers after it would say nothing.
"""
import hashlib
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy as np
from forward import FAMILIES, Model
from gguf import GGUFReader
from gguf.quants import dequantize

CASES = [(f"tiny-{family}", kind) for family in FAMILIES for kind in ("F32", "Q8_0", "Q4_K_M")]
CASES += [("tiny-llama", kind) for kind in
          ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q5_K_M", "Q6_K",
           "IQ4_NL", "IQ4_XS", "MXFP4")]
SEED = 1
MARGIN = 0.01
PROMPT_TOKENS = 40
GREEDY_TOKENS = 32
# Ids below this are bytes and merges of the made vocabulary; above are special tokens.
TEXT_TOKENS = 381


def digits(x, n=7):
    return float(f"{x:.{n}g}")


def too_near(model):
    return model.margin is not None and model.margin < MARGIN


def golden(path, shape, kind, seed):
    """None if a router's choice is too near."""
    model = Model(path)
    rng = random.Random(shape)
    prompt = [rng.randrange(TEXT_TOKENS) for _ in range(PROMPT_TOKENS)]
    logits = model.logits(prompt)
    if too_near(model):
        return None
    top = np.argsort(-logits, axis=-1)[:, :5]
    peak = logits.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(logits - peak).sum(axis=-1)) + peak[:, 0]
    sequence, greedy = list(prompt), []
    while len(greedy) < GREEDY_TOKENS:
        last = model.logits(sequence)[-1]
        if too_near(model):
            return None
        second, first = np.argsort(last)[-2:]
        greedy.append([int(first), digits(last[first] - last[second], 4)])
        sequence.append(int(first))
    decoded = hashlib.sha256()
    for t in GGUFReader(path).tensors:
        decoded.update(dequantize(t.data, t.tensor_type).astype("<f4").tobytes())
    margin = {} if model.margin is None else {"margin": digits(model.margin, 4)}
    return margin | {
        "shape": shape, "type": kind, "seed": seed, "sha256": decoded.hexdigest(), "prompt": prompt,
        "positions": [{"top": [[int(i), digits(row[i])] for i in ids], "logsumexp": digits(z)}
                      for row, ids, z in zip(logits, top, lse)],
        "last": [digits(x) for x in logits[-1]], "greedy": greedy,
    }


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/dynalm/tests/golden")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        only = [f"tiny-{family}" for family in sys.argv[2:]]
        for shape, kind in CASES:
            if only and shape not in only:
                continue
            path = pathlib.Path(folder) / "model.gguf"
            made, seed = None, SEED
            while made is None:
                make = ["cargo", "xtask", "make-model", shape, path, "--type", kind, "--seed", seed]
                subprocess.run([str(a) for a in make], check=True)
                made, seed = golden(path, shape, kind, seed), seed + 1
            (out / f"{shape}-{kind}.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")
            margins = sorted(m for _, m in made["greedy"])
            print(f"{shape} {kind}: logits' deviation {np.std(made['last']):.2f}, smallest margins {margins[:3]}, "
                  f"{len({t for t, _ in made['greedy']})} different tokens")


main()
