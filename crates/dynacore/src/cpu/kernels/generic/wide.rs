//! Attention of many lines over one chunk of a sequence's context, in f32 vectors.
//!
//! Lines and chunks are those of [`super::attention`]. As with tiles ([`crate::cpu::kernels::amx::attention`]),
//! everything stands *transposed*, tokens or elements of the head down and lines across:
//!
//! ```text
//! scores  [tokens, lines] = K [tokens, D] · Qᵀ [D, lines]
//! weights [tokens, lines] = 2^(scores − max)
//! sums    [D, lines]      = Vᵀ [D, tokens] · weights + sums · 2^(old max − max)
//! ```
//!
//! Both products are one kernel ([`outer`]): rows of lines times single numbers of the other operand, which is why keys
//! stand in panels of [`PANEL`] tokens and values in panels of [`PANEL`] elements. No sum crosses a vector, and keys and
//! values are decoded once for all lines of an item.
//!
//! # What a line's result depends on
//!
//! Its query, the tokens it sees and their places: every element is one chain of multiply-adds in the order of elements
//! or tokens, and weights of unseen tokens are exact zeros, wherever the range of tokens begins or ends for the sake of
//! other lines.

use std::ops::Range;

use super::attention::CHUNK;
use crate::cpu::kernels::simd::{Simd, math};

/// Lines that are taken together.
pub(crate) const BLOCK: usize = 32;

/// Lines that come and go together.
pub(crate) const TILE: usize = 16;

/// Tokens that come together.
pub(crate) const TOKENS: usize = 32;

/// Tokens of a panel of keys, elements of a panel of values.
pub(crate) const PANEL: usize = 16;

/// Tokens whose weights and values of a panel stay in the nearest cache (16 and 8 KB).
const RUN: usize = 128;

/// Below every score, far enough from the end of f32 that differences stay finite.
pub(crate) const LOWEST: f32 = -1e30;

/// The score of an unseen token: its distance to [`LOWEST`] vanishes as a power of two.
pub(crate) const UNSEEN: f32 = -3e38;

/// log2 of weights that are taken for zero: no sum of f32 holds what is so much smaller than its largest part, and
/// numbers below the normal ones cost a hundred times as much.
pub(crate) const NEGLIGIBLE: f32 = -64.0;

/// How scores become weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scoring {
    /// Multiplies q·k.
    pub(crate) scale: f32,
    /// Softcap of the scores.
    pub(crate) softcap: Option<f32>,
}

impl Scoring {
    /// What queries are multiplied with: scores are powers of two, if there is no cap, which is of the plain scores.
    pub(crate) fn factor(&self) -> f32 {
        match self.softcap {
            Some(_) => self.scale,
            None => self.scale * std::f32::consts::LOG2_E,
        }
    }
}

/// Kernels of many lines: a worker's own memory for the lines of an item and for a chunk of keys and values.
pub(crate) trait Wide: Send {
    /// What the head size is rounded up to.
    fn deep(&self) -> usize;

    /// Values beyond it are not finite to these kernels.
    fn largest(&self) -> f32;

    /// Begins an item of `lines` lines (rounded up to blocks) of heads of `stride` elements, a multiple of
    /// [`Wide::deep`].
    ///
    /// # Panics
    /// If it is none.
    fn begin(&mut self, lines: usize, stride: usize);

    /// Takes the queries of [`TILE`] lines from line `TILE * tile` on, `[TILE][stride]`.
    ///
    /// # Panics
    /// If there are no such lines.
    fn queries(&mut self, tile: usize, rows: &[f32], scoring: &Scoring);

    /// Takes keys of group `group` of a chunk's tokens, `[TOKENS][stride]`. Unseen ones may be anything.
    ///
    /// # Panics
    /// If there is no such group.
    fn keys(&mut self, group: usize, rows: &[f32]);

    /// Takes values of group `group` of a chunk's tokens, `[TOKENS][stride]`; says whether all are finite (see
    /// [`Wide::largest`]), as they must be: a token that some lines see meets others with a weight of zero.
    ///
    /// # Panics
    /// If there is no such group.
    fn values(&mut self, group: usize, rows: &[f32]) -> bool;

    /// All lines meet the tokens of the chunk they see: `seen` has `start..end` of each line, counted from the chunk's
    /// first token, up to a whole block. Keys and values of every group of tokens any line sees have been taken.
    ///
    /// # Panics
    /// If there are not as many ranges as lines.
    fn chunk(&mut self, seen: &[[i32; 2]], scoring: &Scoring);

    /// The results of [`TILE`] lines from line `TILE * tile` on, `[TILE][stride]`: sums over the sums of weights.
    ///
    /// # Panics
    /// If there are no such lines.
    fn finish(&mut self, tile: usize, rows: &mut [f32]);
}

/// `N` numbers, aligned to a line of the cache.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Row<const N: usize>([f32; N]);

impl<const N: usize> Row<N> {
    const ZERO: Row<N> = Row([0.0; N]);
}

type Lines = Row<BLOCK>;
type Panel = Row<PANEL>;

/// The lines of an item and a chunk of keys and values: a worker's own memory.
#[derive(Default)]
pub(crate) struct Panels {
    /// Head size, rounded up to whole panels.
    stride: usize,
    lines: usize,
    /// `[lines / BLOCK][D]`.
    queries: Vec<Lines>,
    /// `[tokens / PANEL][D]`.
    keys: Vec<Panel>,
    /// `[D / PANEL][tokens]`.
    values: Vec<Panel>,
    /// Whether the values that were taken last are finite.
    finite: bool,
    /// `[tokens]`: a block's; then its weights.
    scores: Vec<Lines>,
    /// `[lines / BLOCK][D]`.
    sums: Vec<Lines>,
    /// Largest score so far, in powers of two, and the sum of the weights, `[lines / BLOCK]`.
    max: Vec<Lines>,
    sum: Vec<Lines>,
}

impl Panels {
    /// See [`Wide::begin`].
    pub(crate) fn begin(&mut self, lines: usize, stride: usize) {
        assert!(stride.is_multiple_of(PANEL), "whole panels of a head");
        (self.lines, self.stride) = (lines, stride);
        let blocks = lines.div_ceil(BLOCK);
        self.queries.resize(blocks * stride, Row::ZERO);
        self.keys.resize(CHUNK / PANEL * stride, Row::ZERO);
        self.values.resize(stride / PANEL * CHUNK, Row::ZERO);
        self.scores.resize(CHUNK, Row::ZERO);
        self.sums.clear();
        self.sums.resize(blocks * stride, Row::ZERO);
        self.max.clear();
        self.max.resize(blocks, Row([LOWEST; BLOCK]));
        self.sum.clear();
        self.sum.resize(blocks, Row::ZERO);
    }

    /// Whether the values that were taken last are finite.
    pub(crate) fn finite(&self) -> bool {
        self.finite
    }
}

/// See [`Wide::queries`].
#[inline(always)]
pub(crate) fn queries<S: Simd>(s: S, w: &mut Panels, tile: usize, rows: &[f32], scoring: &Scoring) {
    let stride = w.stride;
    assert_eq!(rows.len(), TILE * stride, "the lines of a tile");
    let (block, first) = (tile * TILE / BLOCK, tile * TILE % BLOCK);
    let out = &mut w.queries[block * stride..(block + 1) * stride];
    let factor = s.splat(scoring.factor());
    for line in (0..TILE).step_by(S::LANES) {
        for (d, out) in out.chunks_exact_mut(S::LANES).enumerate() {
            let x = &rows[line * stride + d * S::LANES..];
            s.transpose(x, &mut flat(out)[first + line..], [stride, BLOCK]);
            for out in out {
                let out = &mut out.0[first + line..];
                s.store(s.mul(s.load(out), factor), out);
            }
        }
    }
}

/// See [`Wide::keys`].
#[inline(always)]
pub(crate) fn keys<S: Simd>(s: S, w: &mut Panels, group: usize, rows: &[f32]) {
    let stride = w.stride;
    assert_eq!(rows.len(), TOKENS * stride, "a group's tokens");
    let panels = &mut w.keys[group * TOKENS / PANEL * stride..][..TOKENS / PANEL * stride];
    for (rows, panel) in rows
        .chunks_exact(PANEL * stride)
        .zip(panels.chunks_exact_mut(stride))
    {
        for token in (0..PANEL).step_by(S::LANES) {
            for (d, out) in panel.chunks_exact_mut(S::LANES).enumerate() {
                let x = &rows[token * stride + d * S::LANES..];
                s.transpose(x, &mut flat(out)[token..], [stride, PANEL]);
            }
        }
    }
}

/// See [`Wide::values`]; notes what it says in [`Panels::finite`].
#[inline(always)]
pub(crate) fn values<S: Simd>(s: S, w: &mut Panels, group: usize, rows: &[f32]) {
    let stride = w.stride;
    assert!(
        rows.len() == TOKENS * stride && group < CHUNK / TOKENS,
        "a group's tokens"
    );
    let zero = s.splat(0.0);
    // Stays zero as long as all are finite.
    let mut nothing = zero;
    for (d, panel) in w.values.chunks_exact_mut(CHUNK).enumerate() {
        let out = &mut panel[group * TOKENS..(group + 1) * TOKENS];
        for (out, row) in out.iter_mut().zip(rows.chunks_exact(stride)) {
            let x = &row[d * PANEL..(d + 1) * PANEL];
            for (x, out) in x.chunks_exact(S::LANES).zip(out.0.chunks_exact_mut(S::LANES)) {
                let x = s.load(x);
                nothing = s.fma(x, zero, nothing);
                s.store(x, out);
            }
        }
    }
    w.finite = s.sum(nothing) == 0.0;
}

/// See [`Wide::chunk`].
#[inline(always)]
pub(crate) fn chunk<S: Simd>(s: S, w: &mut Panels, seen: &[[i32; 2]], scoring: &Scoring) {
    assert_eq!(
        seen.len(),
        w.lines.next_multiple_of(BLOCK),
        "a range for each line"
    );
    for (block, seen) in seen.as_chunks::<BLOCK>().0.iter().enumerate() {
        let visible = seen.iter().filter(|[start, end]| start < end);
        let start = visible.clone().map(|s| s[0]).min().unwrap_or(0) as usize;
        let end = visible.map(|s| s[1]).max().unwrap_or(0) as usize;
        if start >= end {
            continue;
        }
        let lines = (w.lines - block * BLOCK).min(BLOCK);
        // Whole tiles of the product.
        let tokens = start / DOWN * DOWN..end.next_multiple_of(DOWN);
        scores(s, w, block, lines, tokens.clone());
        for at in (0..lines).step_by(S::LANES) {
            weights(s, w, block, at, tokens.clone(), seen, scoring);
        }
        weigh(s, w, block, lines, tokens);
    }
}

/// Largest number of numbers of a panel that [`outer`] takes.
const DOWN: usize = 8;

/// A block's scores of a range of tokens.
#[inline(always)]
fn scores<S: Simd>(s: S, w: &mut Panels, block: usize, lines: usize, tokens: Range<usize>) {
    let stride = w.stride;
    let queries = &w.queries[block * stride..(block + 1) * stride];
    for token in tokens.step_by(DOWN) {
        let keys = &w.keys[token / PANEL * stride..][..stride];
        let out = w.scores[token..].first_chunk_mut().expect("tokens of the chunk");
        *out = [Row::ZERO; DOWN];
        eight(s, queries, lines, keys, token % PANEL, out);
    }
}

/// Adds a block's weighted values to its sums.
#[inline(always)]
fn weigh<S: Simd>(s: S, w: &mut Panels, block: usize, lines: usize, tokens: Range<usize>) {
    let stride = w.stride;
    let sums = &mut w.sums[block * stride..(block + 1) * stride];
    for start in tokens.clone().step_by(RUN) {
        let run = start..tokens.end.min(start + RUN);
        let weights = &w.scores[run.clone()];
        let panels = w.values.chunks_exact(CHUNK).zip(sums.chunks_exact_mut(PANEL));
        for (panel, sums) in panels {
            for (i, sums) in sums.as_chunks_mut::<DOWN>().0.iter_mut().enumerate() {
                eight(s, weights, lines, &panel[run.clone()], i * DOWN, sums);
            }
        }
    }
}

/// [`outer`] of all lines of a block and eight numbers of a panel from `first` on.
#[inline(always)]
fn eight<S: Simd>(
    s: S,
    rows: &[Lines],
    lines: usize,
    panel: &[Panel],
    first: usize,
    out: &mut [Lines; DOWN],
) {
    for at in (0..lines).step_by(2 * S::LANES) {
        let one = lines - at <= S::LANES;
        if S::LANES >= 16 {
            if one {
                outer::<S, 1, 8>(s, rows, at, panel, first, out);
            } else {
                outer::<S, 2, 8>(s, rows, at, panel, first, out);
            }
        } else {
            let (low, high) = out.split_at_mut(4);
            for (i, out) in [low, high].into_iter().enumerate() {
                let out = out.first_chunk_mut().expect("four rows");
                if one {
                    outer::<S, 1, 4>(s, rows, at, panel, first + 4 * i, out);
                } else {
                    outer::<S, 2, 4>(s, rows, at, panel, first + 4 * i, out);
                }
            }
        }
    }
}

/// `out[t][lines] += Σ rows[i][lines] · panel[i][first + t]`, for `V` vectors of lines from `at` on: one chain of
/// multiply-adds for each element, in the order of `i`.
#[inline(always)]
fn outer<S: Simd, const V: usize, const T: usize>(
    s: S,
    rows: &[Lines],
    at: usize,
    panel: &[Panel],
    first: usize,
    out: &mut [Lines; T],
) {
    assert!(at + V * S::LANES <= BLOCK && first + T <= PANEL);
    let mut acc = [[s.splat(0.0); V]; T];
    for (acc, out) in acc.iter_mut().zip(&*out) {
        for (v, acc) in acc.iter_mut().enumerate() {
            *acc = s.load(&out.0[at + v * S::LANES..]);
        }
    }
    for (row, panel) in rows.iter().zip(panel) {
        let mut x = [s.splat(0.0); V];
        for (v, x) in x.iter_mut().enumerate() {
            *x = s.load(&row.0[at + v * S::LANES..]);
        }
        for (t, acc) in acc.iter_mut().enumerate() {
            let y = s.splat(panel.0[first + t]);
            for (acc, x) in acc.iter_mut().zip(&x) {
                *acc = s.fma(*x, y, *acc);
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        for (v, acc) in acc.iter().enumerate() {
            s.store(*acc, &mut out.0[at + v * S::LANES..]);
        }
    }
}

/// Turns the scores of a vector of lines, from line `at` of a block on, into weights; brings their sums to the new
/// largest score.
#[inline(always)]
fn weights<S: Simd>(
    s: S,
    w: &mut Panels,
    block: usize,
    at: usize,
    tokens: Range<usize>,
    seen: &[[i32; 2]; BLOCK],
    scoring: &Scoring,
) {
    let seen = &seen[at..at + S::LANES];
    let scores = &mut w.scores[tokens.clone()];
    let largest = prepare(s, scores, at, tokens.start, seen, scoring);
    let max = &mut w.max[block].0[at..];
    let old = s.load(max);
    let new = s.max(largest, old);
    s.store(new, max);
    let mut sums = [s.splat(0.0); 2];
    for two in scores.as_chunks_mut::<2>().0 {
        for (x, sum) in two.iter_mut().zip(&mut sums) {
            let x = &mut x.0[at..at + S::LANES];
            let weight = power(s, s.sub(s.load(x), new));
            s.store(weight, x);
            *sum = s.add(*sum, weight);
        }
    }
    // 2^0 is exactly one: what other lines see does not move this one's bits.
    let fall = power(s, s.sub(old, new));
    let sum = &mut w.sum[block].0[at..];
    s.store(s.fma(s.load(sum), fall, s.add(sums[0], sums[1])), sum);
    let mut falls = [0.0; BLOCK];
    s.store(fall, &mut falls);
    if falls[..S::LANES].iter().all(|f| *f == 1.0) {
        return;
    }
    for sums in &mut w.sums[block * w.stride..(block + 1) * w.stride] {
        let sums = &mut sums.0[at..at + S::LANES];
        s.store(s.mul(s.load(sums), fall), sums);
    }
}

/// Brings scores, whose first token is `first` of the chunk, into powers of two, those of unseen tokens to [`UNSEEN`];
/// gives the largest of each line.
#[inline(always)]
fn prepare<S: Simd>(
    s: S,
    scores: &mut [Lines],
    at: usize,
    first: usize,
    seen: &[[i32; 2]],
    scoring: &Scoring,
) -> S::V {
    if let Some(cap) = scoring.softcap {
        let log2_e = s.splat(std::f32::consts::LOG2_E);
        for x in scores.iter_mut() {
            let x = &mut x.0[at..at + S::LANES];
            s.store(s.mul(math::softcap(s, cap, s.load(x)), log2_e), x);
        }
    }
    let mut ranges = [[0.0; BLOCK]; 2];
    for (line, range) in seen.iter().enumerate() {
        (ranges[0][line], ranges[1][line]) = (range[0] as f32, range[1] as f32);
    }
    let [starts, ends] = [s.load(&ranges[0]), s.load(&ranges[1])];
    let all_from = seen.iter().map(|s| s[0]).max().unwrap_or(0);
    let all_to = seen.iter().map(|s| s[1]).min().unwrap_or(0);
    let unseen = s.splat(UNSEEN);
    let mut largest = [s.splat(LOWEST); 2];
    for (i, two) in scores.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let token = first + 2 * i;
        let whole = token as i32 >= all_from && token as i32 + 2 <= all_to;
        for (j, x) in two.iter_mut().enumerate() {
            let x = &mut x.0[at..at + S::LANES];
            let mut score = s.load(x);
            if !whole {
                let token = s.splat((token + j) as f32);
                score = s.select_lt(token, starts, unseen, s.select_lt(token, ends, score, unseen));
                s.store(score, x);
            }
            largest[j] = s.max(score, largest[j]);
        }
    }
    s.max(largest[0], largest[1])
}

/// 2^x within 2e-7, for x of at most 0; below [`NEGLIGIBLE`], 0. NaN stays NaN, 2^0 is 1.
#[inline(always)]
fn power<S: Simd>(s: S, x: S::V) -> S::V {
    // Least largest relative error on ±1/2 among those with 1 at 0.
    #[expect(clippy::approx_constant, reason = "the fit says so, not ln 2")]
    const C: [f32; 5] = [
        0.693_147,
        0.240_222_42,
        0.055_507_336,
        0.009_671_513,
        0.001_326_472_6,
    ];
    let low = s.splat(NEGLIGIBLE);
    // `max` gives its second argument for NaN.
    let clamped = s.max(low, x);
    let n = s.round(clamped);
    let f = s.sub(clamped, n);
    let mut p = s.splat(C[4]);
    for c in C[..4].iter().rev() {
        p = s.fma(p, f, s.splat(*c));
    }
    let p = s.fma(p, f, s.splat(1.0));
    s.select_lt(x, low, s.splat(0.0), s.mul(p, s.exp2i(n)))
}

/// See [`Wide::finish`].
#[inline(always)]
pub(crate) fn finish<S: Simd>(s: S, w: &mut Panels, tile: usize, rows: &mut [f32]) {
    let stride = w.stride;
    assert_eq!(rows.len(), TILE * stride, "the lines of a tile");
    let (block, first) = (tile * TILE / BLOCK, tile * TILE % BLOCK);
    let sums = &mut w.sums[block * stride..(block + 1) * stride];
    for line in (0..TILE).step_by(S::LANES) {
        let at = first + line;
        let factor = s.div(s.splat(1.0), s.load(&w.sum[block].0[at..]));
        for (d, sums) in sums.chunks_exact_mut(S::LANES).enumerate() {
            for sums in &mut *sums {
                let x = &mut sums.0[at..at + S::LANES];
                s.store(s.mul(s.load(x), factor), x);
            }
            let out = &mut rows[line * stride + d * S::LANES..];
            s.transpose(&flat(sums)[at..], out, [BLOCK, stride]);
        }
    }
}

/// Rows as the numbers they are.
#[inline(always)]
fn flat<const N: usize>(rows: &mut [Row<N>]) -> &mut [f32] {
    const { assert!(size_of::<Row<N>>() == N * size_of::<f32>()) };
    // SAFETY: a row is its numbers and nothing else, and they are borrowed as the rows are.
    unsafe { std::slice::from_raw_parts_mut(rows.as_mut_ptr().cast(), rows.len() * N) }
}
