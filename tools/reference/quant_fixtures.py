#!/usr/bin/env python3
"""Fixtures of `dynair::quant`: what the Python package `gguf` makes of the same bytes and values.

usage: quant_fixtures.py [OUT_DIR]          (needs: pip install gguf numpy)

Writes `quant.bin` to OUT_DIR (default crates/dynair/tests/data). If `quant_k.bytes` lies there, which the test
`our_encodings_are_pinned` writes under UPDATE_EXPECT=1 (blocks our encoders made of the inputs in `quant.bin`, in the
types `gguf` does not encode), it also writes `quant_k.bin` with what `gguf` decodes them to. The order is therefore: this script, the test, this script.

A fixture is a run of records, each: u8 length and bytes of its name, u32 length and bytes of the encoded data, u32
number and f32s of the values; all little-endian.
  decode/TYPE   values = dequantize(data); data are random blocks and blocks of extremes
  encode/TYPE   data = quantize(values)
  input/K       values alone: what our encoders are pinned on
"""
import pathlib
import struct
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

PLAIN = [T.F32, T.F16, T.BF16]
LEGACY = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0]
K = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K]
TABLE = [T.IQ4_NL, T.IQ4_XS, T.MXFP4]
# Where the f16 fields of a block stand.
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
          T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: []}


def record(name, data, values):
    data = np.ascontiguousarray(data).view(np.uint8).ravel().tobytes()
    values = np.ascontiguousarray(values, dtype=np.float32).ravel()
    return (struct.pack("<B", len(name)) + name.encode() + struct.pack("<I", len(data)) + data
            + struct.pack("<I", values.size) + values.tobytes())


def blocks(rng, t):
    """Random blocks with sane scales, one wholly random, all zeros, all ones, and extreme scales."""
    size = GGML_QUANT_SIZES[t][1]
    made = rng.integers(0, 256, (12 if GGML_QUANT_SIZES[t][0] == 32 else 7, size), dtype=np.uint8)
    extremes = [0x0001, 0x8001, 0x7BFF, 0xFBFF, 0x7C00, 0x8000]  # +-smallest, +-largest, infinity, -0
    for i, block in enumerate(made):
        for field in HALVES[t]:
            half = np.float16(rng.normal() * 0.02)
            if i >= len(made) - 3:
                half = np.array([extremes[rng.integers(len(extremes))]], np.uint16).view(np.float16)[0]
            block[field:field + 2] = np.frombuffer(half.tobytes(), np.uint8)
    made[0] = rng.integers(0, 256, size, dtype=np.uint8)
    made[1], made[2] = 0, 255
    if t == T.MXFP4:
        made[3:7, 0] = 0, 1, 2, 254  # exponents of subnormal scales and the largest below 255
    return made


def inputs(rng):
    """Blocks of 32 values of many kinds; none mixes zeros of both signs at an extreme."""
    n = lambda s, m=0.0: (rng.normal(size=32) * s + m).astype(np.float32)
    rows = [n(1), n(0.02), n(1e-3), n(100), n(1e-7), n(1, 5), n(1, -5), n(0.01, 3), np.zeros(32), np.full(32, 0.25),
            np.full(32, -3.7), np.abs(n(1)), -np.abs(n(1)), np.linspace(-8, 7, 32), np.linspace(7, -8, 32),
            np.tile([1.0, -1.0], 16), np.tile([-2.5, 2.5], 16), n(1) * (rng.random(32) < 0.1), n(1) ** 5,
            np.r_[np.full(31, 0.1), 30.0], np.r_[np.full(31, 0.1), -30.0], n(2000), np.arange(32) - 15.5]
    return np.stack([np.asarray(r, np.float32) + np.float32(0) for r in rows])


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/dynair/tests/data")
    rng = np.random.default_rng(20)
    fixture = b""
    specials = np.array([0x7F800000, 0xFF800000, 0x00000001, 0x80000000, 0x7F7FFFFF, 0x477FE000, 0x477FEFFF, 0x477FF000,
                         0x33000000, 0x33000001, 0x38800000, 0x387FC000, 0x3F808000, 0x3F818000, 0x7F7F8000],
                        np.uint32).view(np.float32)
    plain = np.concatenate([rng.normal(size=49).astype(np.float32), specials])
    for t in PLAIN:
        raw = np.frombuffer(rng.bytes(256), np.uint8)
        fixture += record(f"decode/{t.name}", raw, dequantize(raw, t))
        with np.errstate(over="ignore"):
            fixture += record(f"encode/{t.name}", quantize(plain, t), plain)
    with np.errstate(all="ignore"):
        for t in LEGACY + K:
            raw = blocks(rng, t)
            fixture += record(f"decode/{t.name}", raw, dequantize(raw, t))
    values = inputs(rng)
    for t in LEGACY:
        fixture += record(f"encode/{t.name}", quantize(values, t), values)
    rows = [rng.normal(size=256), rng.normal(size=256) * 0.02 + 0.01, 
            rng.laplace(size=256) * np.repeat(2.0 ** np.arange(-4, 4), 32),
            np.concatenate([np.zeros(128), np.full(64, -1.5), np.linspace(0, 1, 64)])]
    fixture += record("input/K", np.zeros(0, np.uint8), np.stack(rows))
    with np.errstate(all="ignore"):
        for t in TABLE:
            raw = blocks(rng, t)
            fixture += record(f"decode/{t.name}", raw, dequantize(raw, t))
    fixture += record("encode/MXFP4", quantize(values, T.MXFP4), values)
    (out / "quant.bin").write_bytes(fixture)

    encoded = out / "quant_k.bytes"
    if encoded.exists():
        data, fixture = np.frombuffer(encoded.read_bytes(), np.uint8), b""
        for t in K + TABLE[:2]:
            elements, size = GGML_QUANT_SIZES[t]
            n = len(rows) * 256 // elements * size
            fixture += record(f"encode/{t.name}", data[:n], dequantize(data[:n], t))
            data = data[n:]
        assert data.size == 0, "quant_k.bytes has another length than the inputs imply"
        (out / "quant_k.bin").write_bytes(fixture)
        encoded.unlink()


main()
