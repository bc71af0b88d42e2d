//! Attention of a few query lines over one chunk of a sequence's context.
//!
//! A *line* is one query head of one token; all lines of a call share a key/value head. For each line the kernel gives
//! the softmax's parts over the tokens of the chunk the line may see: the largest score m, l = Σ exp(score − m) and
//! acc = Σ exp(score − m)·v. The caller merges chunks in order.
//!
//! A line's result depends on nothing but its query and the tokens it sees: dot products run over the head size with
//! one accumulator vector per (line, token) whatever the blocking; l sums vectors by the token's place in the chunk
//! with exact zeros for unseen tokens; acc adds tokens one after another and never touches an unseen one.

use crate::cpu::kernels::generic::kv::load_rows;
use crate::cpu::kernels::prefetch;
use crate::cpu::kernels::simd::{Simd, math};
use crate::kv::KvType;

/// Tokens of a chunk. Chunk c of a sequence holds positions `c · CHUNK ..`. 256 tokens keep the scores of 16 lines in
/// 16 KB, and a context of a few hundred tokens already splits over workers.
pub(crate) const CHUNK: usize = 256;
/// Most lines of a call.
pub(crate) const MAX_LINES: usize = 16;
/// Tokens whose scores are computed together; segments start and end at multiples of it.
pub(crate) const TOKEN_STEP: usize = 4;

/// A run of tokens of one block, for one key/value head.
#[derive(Clone, Copy)]
pub(crate) struct Segment<'a> {
    /// Place of its first token in the chunk, a multiple of [`TOKEN_STEP`].
    pub(crate) first: usize,
    /// Tokens, a multiple of [`TOKEN_STEP`].
    pub(crate) tokens: usize,
    /// Keys, `[tokens][row bytes]`.
    pub(crate) k: &'a [u8],
    /// Values, `[tokens][row bytes]`.
    pub(crate) v: &'a [u8],
}

/// What a call works on.
pub(crate) struct Chunk<'a> {
    /// How keys and values are stored.
    pub(crate) kind: KvType,
    /// Head size D.
    pub(crate) head_dim: usize,
    /// D rounded up to 16: distance of lines in `q` and `acc`; the padding of `q` is zero.
    pub(crate) stride: usize,
    /// Multiplies q·k.
    pub(crate) scale: f32,
    /// Softcap of the scores.
    pub(crate) softcap: Option<f32>,
    /// `[lines][stride]`.
    pub(crate) q: &'a [f32],
    /// Per line the tokens of the chunk it sees, `start..end`; empty: none.
    pub(crate) seen: &'a [(usize, usize)],
    /// The tokens any line sees, in order.
    pub(crate) segments: &'a [Segment<'a>],
}

/// Where a call puts its results, and scratch.
pub(crate) struct ChunkOut<'a> {
    /// Scratch `[lines][CHUNK]`.
    pub(crate) scores: &'a mut [f32],
    /// Scratch for a decoded segment, `[tokens][stride]`.
    pub(crate) rows: &'a mut [f32],
    /// `[lines]`.
    pub(crate) max: &'a mut [f32],
    /// `[lines]`.
    pub(crate) sum: &'a mut [f32],
    /// `[lines][stride]`.
    pub(crate) acc: &'a mut [f32],
}

/// Rows of keys or values the micro-kernels read.
#[derive(Clone, Copy)]
enum Rows<'a> {
    F32(&'a [f32], usize),
    F16(&'a [u8], usize),
}

impl Rows<'_> {
    /// # Safety
    /// Row `row` must have `LANES` elements from `at`.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, row: usize, at: usize) -> S::V {
        match self {
            // SAFETY: the caller's promise.
            Rows::F32(x, stride) => unsafe { s.load_ptr(x.as_ptr().add(row * stride + at)) },
            // SAFETY: the caller's promise.
            Rows::F16(x, stride) => unsafe { s.load_f16_ptr(x.as_ptr().add(2 * (row * stride + at))) },
        }
    }

    /// Panics unless `rows` rows of `width` elements are there.
    fn check(&self, rows: usize, width: usize) {
        let elements = match self {
            Rows::F32(x, stride) => (x.len(), *stride),
            Rows::F16(x, stride) => (x.len() / 2, *stride),
        };
        assert!(
            rows == 0 || (rows - 1) * elements.1 + width <= elements.0,
            "rows lie inside their memory"
        );
    }
}

/// Few lines read binary16 as it is; more lines than this decode a segment once and share it.
const DIRECT_LINES: usize = 4;

/// Segments that are asked for before their use: a block of keys of one head is too short for the hardware to notice that
/// it is read in order, and neighbours in time are none in memory. Zen 4, 4 decodes of Gemma 270M's shape at a context of 512:
/// work of attention 4.4 ms before, 3.6 after (four rounds in turn); SmolLM2's shape, with blocks of 2 KB: no difference.
const AHEAD: usize = 3;

/// Asks for the memory of segment `i` of all keys and then all values, if there is one.
#[inline(always)]
fn ask_for(segments: &[Segment<'_>], i: usize) {
    let keys = segments.get(i).map(|s| s.k);
    let values = || segments.get(i.checked_sub(segments.len())?).map(|s| s.v);
    for line in keys.or_else(values).unwrap_or(&[]).chunks(64) {
        prefetch(line.as_ptr());
    }
}

/// See the module's docs.
#[inline(always)]
pub(crate) fn attend<S: Simd>(s: S, c: &Chunk<'_>, out: &mut ChunkOut<'_>) {
    let lines = c.seen.len();
    assert!(lines <= MAX_LINES && c.q.len() >= lines * c.stride && c.stride.is_multiple_of(16));
    assert!(out.scores.len() >= lines * CHUNK && out.acc.len() >= lines * c.stride);
    for i in 0..AHEAD {
        ask_for(c.segments, i);
    }
    for (i, segment) in c.segments.iter().enumerate() {
        ask_for(c.segments, i + AHEAD);
        assert!(segment.first + segment.tokens <= CHUNK && segment.tokens.is_multiple_of(TOKEN_STEP));
        let (rows, width) = decode(s, c, segment.k, segment.tokens, out.rows, lines);
        rows.check(segment.tokens, width);
        match rows {
            Rows::F32(x, stride) => scores(s, c, segment, Rows::F32(x, stride), width, out.scores),
            Rows::F16(x, stride) => scores(s, c, segment, Rows::F16(x, stride), width, out.scores),
        }
    }
    for (line, &(start, end)) in c.seen.iter().enumerate() {
        let scores = &mut out.scores[line * CHUNK..(line + 1) * CHUNK];
        (out.max[line], out.sum[line]) = softmax(s, c, scores, start, end);
    }
    out.acc[..lines * c.stride].fill(0.0);
    for (i, segment) in c.segments.iter().enumerate() {
        ask_for(c.segments, c.segments.len() + i + AHEAD);
        let (rows, width) = decode(s, c, segment.v, segment.tokens, out.rows, lines);
        rows.check(segment.tokens, width);
        match rows {
            Rows::F32(x, stride) => weighted(s, c, segment, Rows::F32(x, stride), width, out.scores, out.acc),
            Rows::F16(x, stride) => weighted(s, c, segment, Rows::F16(x, stride), width, out.scores, out.acc),
        }
    }
}

/// The rows of a segment in a form the micro-kernels read, and how many elements of a row they read.
#[inline(always)]
fn decode<'a, S: Simd>(
    s: S,
    c: &Chunk<'_>,
    bytes: &'a [u8],
    tokens: usize,
    scratch: &'a mut [f32],
    lines: usize,
) -> (Rows<'a>, usize) {
    if c.kind == KvType::F16 && lines <= DIRECT_LINES && c.head_dim.is_multiple_of(S::LANES) {
        return (Rows::F16(bytes, c.head_dim), c.head_dim);
    }
    let scratch = &mut scratch[..tokens * c.stride];
    if c.head_dim != c.stride {
        scratch.fill(0.0);
    }
    load_rows(s, c.kind, bytes, c.head_dim, c.stride, scratch);
    (
        Rows::F32(scratch, c.stride),
        c.head_dim.next_multiple_of(S::LANES),
    )
}

/// Lines taken together from `line` on: 4, or 3 where that divides the lines evenly (three query heads a group).
#[inline(always)]
fn group(lines: usize, line: usize) -> usize {
    let step = if !lines.is_multiple_of(4) && lines.is_multiple_of(3) {
        3
    } else {
        4
    };
    step.min(lines - line)
}

/// q·k of all lines and the tokens of a segment.
#[inline(always)]
fn scores<S: Simd>(s: S, c: &Chunk<'_>, seg: &Segment<'_>, rows: Rows<'_>, width: usize, out: &mut [f32]) {
    let lines = c.seen.len();
    let mut line = 0;
    while line < lines {
        let n = group(lines, line);
        let q = &c.q[line * c.stride..];
        for token in (0..seg.tokens).step_by(TOKEN_STEP) {
            let at = line * CHUNK + seg.first + token;
            match n {
                1 => dots::<S, 1, 4>(s, q, c.stride, rows, token, width, &mut out[at..]),
                2 => dots::<S, 2, 4>(s, q, c.stride, rows, token, width, &mut out[at..]),
                3 => dots::<S, 3, 4>(s, q, c.stride, rows, token, width, &mut out[at..]),
                _ => dots::<S, 4, 2>(s, q, c.stride, rows, token, width, &mut out[at..]),
            }
        }
        line += n;
    }
}

/// `R` lines by four tokens, `T` of them at a time so that the accumulators stay in registers.
#[inline(always)]
fn dots<S: Simd, const R: usize, const T: usize>(
    s: S,
    q: &[f32],
    stride: usize,
    rows: Rows<'_>,
    token: usize,
    width: usize,
    out: &mut [f32],
) {
    assert!(q.len() >= (R - 1) * stride + width && width <= stride && width.is_multiple_of(S::LANES));
    let mut all = [[s.splat(0.0); TOKEN_STEP]; R];
    for part in (0..TOKEN_STEP).step_by(T) {
        let mut acc = [[s.splat(0.0); T]; R];
        for at in (0..width).step_by(S::LANES) {
            let mut lines = [s.splat(0.0); R];
            for (r, line) in lines.iter_mut().enumerate() {
                // SAFETY: `at + LANES <= width`, and `q` holds R lines of that width (asserted above).
                *line = unsafe { s.load_ptr(q.as_ptr().add(r * stride + at)) };
            }
            #[expect(clippy::needless_range_loop, reason = "t also names the token")]
            for t in 0..T {
                // SAFETY: `attend` has checked that the segment's rows have `width` elements, and a segment holds a
                // multiple of TOKEN_STEP tokens.
                let k = unsafe { rows.load(s, token + part + t, at) };
                for r in 0..R {
                    acc[r][t] = s.fma(lines[r], k, acc[r][t]);
                }
            }
        }
        for (all, acc) in all.iter_mut().zip(&acc) {
            all[part..part + T].copy_from_slice(acc);
        }
    }
    for (r, acc) in all.into_iter().enumerate() {
        out[r * CHUNK..r * CHUNK + TOKEN_STEP].copy_from_slice(&s.sum4(acc));
    }
}

/// Turns a line's products into weights exp(score − m) in place; gives m and their sum.
#[inline(always)]
fn softmax<S: Simd>(s: S, c: &Chunk<'_>, scores: &mut [f32], start: usize, end: usize) -> (f32, f32) {
    if start >= end {
        return (f32::NEG_INFINITY, 0.0);
    }
    let low = start / S::LANES * S::LANES;
    let high = end.next_multiple_of(S::LANES);
    scores[low..start].fill(f32::NEG_INFINITY);
    scores[end..high].fill(f32::NEG_INFINITY);
    let scale = s.splat(c.scale);
    let mut largest = s.splat(f32::NEG_INFINITY);
    for x in scores[low..high].chunks_exact_mut(S::LANES) {
        let mut v = s.mul(s.load(x), scale);
        if let Some(cap) = c.softcap {
            v = math::softcap(s, cap, v);
        }
        s.store(v, x);
        largest = s.max(largest, v);
    }
    // Unseen tokens must weigh nothing whatever a negative scale or the cap made of −∞.
    scores[low..start].fill(f32::NEG_INFINITY);
    scores[end..high].fill(f32::NEG_INFINITY);
    if c.softcap.is_some() || c.scale <= 0.0 {
        largest = s.splat(f32::NEG_INFINITY);
        for x in scores[low..high].chunks_exact(S::LANES) {
            largest = s.max(largest, s.load(x));
        }
    }
    let max = s.largest(largest);
    let (m, mut sum) = (s.splat(max), s.splat(0.0));
    for x in scores[low..high].chunks_exact_mut(S::LANES) {
        let p = math::exp(s, s.sub(s.load(x), m));
        s.store(p, x);
        sum = s.add(sum, p);
    }
    (max, s.sum(sum))
}

/// acc += weights · v for the tokens of a segment.
#[inline(always)]
fn weighted<S: Simd>(
    s: S,
    c: &Chunk<'_>,
    seg: &Segment<'_>,
    rows: Rows<'_>,
    width: usize,
    weights: &[f32],
    acc: &mut [f32],
) {
    let lines = c.seen.len();
    let mut line = 0;
    while line < lines {
        let n = group(lines, line);
        let (mut from, mut to) = seen_of(c, seg, line);
        for l in line + 1..line + n {
            let (start, end) = seen_of(c, seg, l);
            from = from.max(start);
            to = to.min(end);
        }
        let to = to.max(from);
        // What only some lines of the group see goes line by line, before and after, so that each adds in order.
        for l in line..line + n {
            let (start, end) = seen_of(c, seg, l);
            weighted_group(
                s,
                c,
                seg,
                rows,
                width,
                weights,
                acc,
                (l, 1),
                (start, end.min(from)),
            );
        }
        weighted_group(s, c, seg, rows, width, weights, acc, (line, n), (from, to));
        for l in line..line + n {
            let (start, end) = seen_of(c, seg, l);
            weighted_group(s, c, seg, rows, width, weights, acc, (l, 1), (to.max(start), end));
        }
        line += n;
    }
}

/// Tokens of the segment a line sees, counted from the segment's first.
#[inline(always)]
fn seen_of(c: &Chunk<'_>, seg: &Segment<'_>, line: usize) -> (usize, usize) {
    let (start, end) = c.seen[line];
    let start = start.max(seg.first) - seg.first;
    (
        start,
        end.min(seg.first + seg.tokens)
            .saturating_sub(seg.first)
            .max(start),
    )
}

/// Lines `(first, count)` over tokens `(from, to)` of a segment. A function, not a closure: a closure could not be
/// made to be compiled for the caller's instruction set.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the innermost split of a kernel")]
fn weighted_group<S: Simd>(
    s: S,
    c: &Chunk<'_>,
    seg: &Segment<'_>,
    rows: Rows<'_>,
    width: usize,
    weights: &[f32],
    acc: &mut [f32],
    (line, count): (usize, usize),
    (from, to): (usize, usize),
) {
    let p = &weights[line * CHUNK + seg.first..];
    let a = &mut acc[line * c.stride..];
    match count {
        1 => weighted_lines::<S, 1, 8>(s, p, rows, from..to, width, c.stride, a),
        2 => weighted_lines::<S, 2, 4>(s, p, rows, from..to, width, c.stride, a),
        3 => weighted_lines::<S, 3, 4>(s, p, rows, from..to, width, c.stride, a),
        _ => weighted_lines::<S, 4, 2>(s, p, rows, from..to, width, c.stride, a),
    }
}

/// `R` lines over a run of tokens, `D` vectors of the head at a time.
#[inline(always)]
fn weighted_lines<S: Simd, const R: usize, const D: usize>(
    s: S,
    weights: &[f32],
    rows: Rows<'_>,
    tokens: std::ops::Range<usize>,
    width: usize,
    stride: usize,
    acc: &mut [f32],
) {
    if tokens.is_empty() {
        return;
    }
    let mut at = 0;
    while at + D * S::LANES <= width {
        weighted_part::<S, R, D>(s, weights, rows, tokens.clone(), at, stride, acc);
        at += D * S::LANES;
    }
    while at < width {
        weighted_part::<S, R, 1>(s, weights, rows, tokens.clone(), at, stride, acc);
        at += S::LANES;
    }
}

#[inline(always)]
fn weighted_part<S: Simd, const R: usize, const D: usize>(
    s: S,
    weights: &[f32],
    rows: Rows<'_>,
    tokens: std::ops::Range<usize>,
    at: usize,
    stride: usize,
    acc: &mut [f32],
) {
    let weights: [&[f32]; R] = std::array::from_fn(|r| &weights[r * CHUNK..][..tokens.end]);
    let mut sums = [[s.splat(0.0); D]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        for (d, v) in sums.iter_mut().enumerate() {
            *v = s.load(&acc[r * stride + at + d * S::LANES..]);
        }
    }
    for token in tokens {
        let mut p = [s.splat(0.0); R];
        for (p, weights) in p.iter_mut().zip(&weights) {
            *p = s.splat(weights[token]);
        }
        #[expect(clippy::needless_range_loop, reason = "d also names the vector of the head")]
        for d in 0..D {
            // SAFETY: `attend` has checked that the segment's rows have `width` elements; `token` lies in the segment
            // and `at + D · LANES <= width`.
            let v = unsafe { rows.load(s, token, at + d * S::LANES) };
            for r in 0..R {
                sums[r][d] = s.fma(p[r], v, sums[r][d]);
            }
        }
    }
    for (r, sums) in sums.into_iter().enumerate() {
        for (d, v) in sums.into_iter().enumerate() {
            s.store(v, &mut acc[r * stride + at + d * S::LANES..]);
        }
    }
}
