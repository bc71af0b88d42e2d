//! Attention of many lines over one chunk of a sequence's context, on bf16 tiles.
//!
//! Lines and chunks are those of [`crate::cpu::kernels::generic::attention`]; lines are taken by [`BLOCK`], tokens by
//! [`TOKENS`]. Everything stands *transposed*, tokens or elements of the head down and lines across, so that a vector
//! is sixteen lines: the softmax needs no sums across a vector, and its result is the next product's right operand.
//!
//! ```text
//! scores  [tokens, lines] = K [tokens, D] · Qᵀ [D, lines]
//! weights [tokens, lines] = 2^(scores − max)                 max, sum: one vector per 16 lines
//! sums    [D, lines]      = Vᵀ [D, tokens] · weights + sums · 2^(old max − max)
//! ```
//!
//! # Precision
//!
//! Scores stand in an exponent, and keys may be large (some models add a bias of hundreds to them): queries and keys are
//! the sum of two bf16 each, high and low, and three of the four products are made, which leaves an error of 2^-16.
//! Queries are multiplied with the scale and log2 e before. Weights and values are one bf16 each: their errors, 2^-9 a
//! piece, are those of every product from tiles. As there, this is for `auto` mode.
//!
//! # What a line's result depends on
//!
//! Its query, the tokens it sees and their places, as ever: weights of unseen tokens are zero, and a tile of zeros adds
//! nothing, wherever the range of tokens begins or ends for the sake of other lines.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::many::two_by_two;
use super::{Line, TILE, TILE_ROWS, configure};
use crate::cpu::kernels::generic::attention::CHUNK;
use crate::cpu::kernels::generic::wide::{
    BLOCK, LOWEST, NEGLIGIBLE, Scoring, TILE as LINES, TOKENS, UNSEEN, Wide,
};
use crate::cpu::kernels::simd::{
    Simd,
    avx512::{Avx512, transposed},
    math,
};
use crate::cpu::kernels::{GROUP, ROWS};
use crate::cpu::table::KernelTable;

/// Groups of [`TOKENS`] of a chunk.
const GROUPS: usize = CHUNK / TOKENS;

/// The largest bf16: values beyond it become infinite.
const LARGEST: f32 = f32::from_bits(0x7f7f_0000);

/// Tiles in memory, aligned to lines.
#[derive(Default)]
struct Tiles(Vec<Line>);

impl Tiles {
    const LINES: usize = TILE / size_of::<Line>();

    fn resize(&mut self, tiles: usize) {
        self.0.resize(tiles * Self::LINES, Line::ZERO);
    }

    /// Where `count` tiles from tile `first` on begin.
    fn at(&mut self, first: usize, count: usize) -> *mut u8 {
        self.0[first * Self::LINES..(first + count) * Self::LINES]
            .as_mut_ptr()
            .cast()
    }
}

/// The lines of an item and a chunk of keys and values, as tiles: a worker's own memory. There is one only where tiles
/// may be used, see [`OnTiles::of`].
pub(crate) struct OnTiles {
    /// Head size, rounded up to whole groups of 32.
    stride: usize,
    lines: usize,
    /// `[lines / 16][D / 32][high, low]`, pairs of elements down, lines across.
    queries: Tiles,
    /// `[tokens / 16][D / 32][high, low]`, tokens down, elements across.
    keys: Tiles,
    /// `[D / 16][tokens / 32]`, elements down, tokens across.
    values: Tiles,
    /// `[2][tokens][16]` f32: a block's.
    scores: Tiles,
    /// `[2][tokens / 32]`, pairs of tokens down, lines across: a block's.
    weights: Tiles,
    /// `[lines / 16][D / 16]` f32, elements down, lines across.
    sums: Tiles,
    /// Largest score so far, in powers of two, and the sum of the weights.
    max: Vec<f32>,
    sum: Vec<f32>,
}

impl OnTiles {
    /// For the kernels of a table, if it has tiles: a table is handed out only if the CPU has its instruction set and the
    /// system permits tiles.
    pub(crate) fn of(table: &KernelTable) -> Option<OnTiles> {
        table.tiles.as_ref().map(|_| OnTiles {
            stride: 0,
            lines: 0,
            queries: Tiles::default(),
            keys: Tiles::default(),
            values: Tiles::default(),
            scores: Tiles::default(),
            weights: Tiles::default(),
            sums: Tiles::default(),
            max: Vec::new(),
            sum: Vec::new(),
        })
    }

    /// See [`Wide::queries`].
    ///
    /// # Safety
    /// The CPU has the table's instruction set.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn queries_inner(&mut self, tile: usize, rows: &[f32], scoring: &Scoring) {
        let (stride, groups) = (self.stride, self.stride / GROUP);
        assert_eq!(rows.len(), ROWS * stride, "sixteen lines");
        let out = self.queries.at(tile * 2 * groups, 2 * groups);
        let factor = _mm512_set1_ps(scoring.factor());
        for g in 0..groups {
            let (mut high, mut low) = ([_mm512_setzero_si512(); ROWS], [_mm512_setzero_si512(); ROWS]);
            for (r, row) in rows.chunks_exact(stride).enumerate() {
                let x: &[f32; GROUP] = row[g * GROUP..].first_chunk().expect("a group of the head");
                [high[r], low[r]] = halves(x, factor);
            }
            for (half, lines) in [high, low].into_iter().enumerate() {
                // SAFETY: `at` has checked that the tile lies in memory of our own.
                unsafe { store(transposed(lines), out.add((2 * g + half) * TILE)) };
            }
        }
    }

    /// See [`Wide::keys`].
    ///
    /// # Safety
    /// The CPU has the table's instruction set.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn keys_inner(&mut self, group: usize, rows: &[f32]) {
        let (stride, groups) = (self.stride, self.stride / GROUP);
        assert_eq!(rows.len(), TOKENS * stride, "a group's tokens");
        let out = self.keys.at(group * 4 * groups, 4 * groups);
        let one = _mm512_set1_ps(1.0);
        for (t, row) in rows.chunks_exact(stride).enumerate() {
            for (g, x) in row.as_chunks().0.iter().enumerate() {
                let tile = (t / ROWS * groups + g) * 2;
                for (half, words) in halves(x, one).into_iter().enumerate() {
                    // SAFETY: `at` has checked that the tile lies in memory of our own; a tile has sixteen lines.
                    unsafe {
                        let line = out.add((tile + half) * TILE + t % ROWS * size_of::<Line>());
                        _mm512_store_si512(line.cast(), words);
                    }
                }
            }
        }
    }

    /// See [`Wide::values`].
    ///
    /// # Safety
    /// The CPU has the table's instruction set.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn values_inner(&mut self, group: usize, rows: &[f32]) -> bool {
        let stride = self.stride;
        assert!(
            rows.len() == TOKENS * stride && group < GROUPS,
            "a group's tokens"
        );
        let first: [i16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as i16);
        // SAFETY: both are 64 bytes of integers.
        let pairs = unsafe { std::mem::transmute::<[i16; 32], __m512i>(first) };
        let mut largest = _mm512_setzero_si512();
        for d in 0..stride / ROWS {
            let out = self.values.at(d * GROUPS + group, 1);
            let mut lines = [_mm512_setzero_si512(); ROWS];
            for (line, two) in lines.iter_mut().zip(rows.chunks_exact(2 * stride)) {
                let part = |row: usize| {
                    let x: &[f32; ROWS] = two[row * stride + d * ROWS..]
                        .first_chunk()
                        .expect("sixteen values");
                    // SAFETY: `x` is 64 bytes.
                    unsafe { _mm512_loadu_ps(x.as_ptr()) }
                };
                let parts = [part(0), part(1)];
                for part in parts {
                    let size = _mm512_and_si512(_mm512_castps_si512(part), _mm512_set1_epi32(i32::MAX));
                    largest = _mm512_max_epi32(largest, size);
                }
                *line = _mm512_permutexvar_epi16(pairs, bf16(parts[1], parts[0]));
            }
            // SAFETY: `at` has checked that the tile lies in memory of our own.
            unsafe { store(transposed(lines), out) };
        }
        _mm512_reduce_max_epi32(largest) <= LARGEST.to_bits() as i32
    }

    /// See [`Wide::chunk`].
    ///
    /// # Safety
    /// The CPU has the table's instruction set and [`super::permitted`] was true.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn chunk_inner(&mut self, seen: &[[i32; 2]], scoring: &Scoring) {
        assert_eq!(seen.len(), self.lines, "a range for each line");
        // SAFETY: the caller promises the permission; nothing that is called here configures tiles anew.
        unsafe { configure() };
        for (block, seen) in seen.as_chunks::<BLOCK>().0.iter().enumerate() {
            let visible = seen.iter().filter(|[start, end]| start < end);
            let start = visible.clone().map(|s| s[0]).min().unwrap_or(0) as usize;
            let end = visible.map(|s| s[1]).max().unwrap_or(0) as usize;
            let groups = start / TOKENS..end.div_ceil(TOKENS);
            if groups.is_empty() {
                continue;
            }
            // SAFETY: the caller's promise; tiles are configured.
            unsafe {
                self.scores(block, groups.clone());
                for half in 0..2 {
                    let seen = seen[half * ROWS..].first_chunk().expect("half a block");
                    self.weights(block, half, groups.clone(), seen, scoring);
                }
                self.weigh(block, groups);
            }
        }
        // SAFETY: as for `configure`.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }

    /// A block's scores.
    ///
    /// # Safety
    /// Tiles are configured.
    unsafe fn scores(&mut self, block: usize, groups: Range<usize>) {
        let each = self.stride / GROUP;
        let queries = self.queries.at(block * 4 * each, 4 * each);
        for group in groups {
            let keys = self.keys.at(group * 4 * each, 4 * each);
            let out = self.scores.at(2 * group, CHUNK / ROWS + 2);
            // SAFETY: tiles are configured; `at` has checked the memory, in which the second half of the block's scores
            // lies that much behind the first.
            unsafe { products(keys, queries, each, [out, out.add(CHUNK / ROWS * TILE)]) };
        }
    }

    /// Turns the scores of one half of a block into weights, brings its sums to the new largest score.
    ///
    /// # Safety
    /// The CPU has the table's instruction set.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn weights(
        &mut self,
        block: usize,
        half: usize,
        groups: Range<usize>,
        seen: &[[i32; 2]; ROWS],
        scoring: &Scoring,
    ) {
        let lines = block * BLOCK + half * ROWS;
        let tokens = groups.len() * TOKENS;
        let scores = self
            .scores
            .at(half * CHUNK / ROWS + 2 * groups.start, 2 * groups.len());
        // SAFETY: `at` has checked the memory, in which there are sixteen scores for each token.
        let scores = unsafe { std::slice::from_raw_parts_mut(scores.cast::<[f32; ROWS]>(), tokens) };
        let largest = prepare_scores(scores, (groups.start * TOKENS) as i32, seen, scoring);
        let weights = self.weights.at(half * groups.len(), groups.len());
        let max: &mut [f32; ROWS] = self.max[lines..].first_chunk_mut().expect("sixteen lines");
        let sum: &mut [f32; ROWS] = self.sum[lines..].first_chunk_mut().expect("sixteen lines");
        let half_mask = _mm512_set1_epi32(0x8000);
        // SAFETY: loads and stores of sixteen values each; a line of weights for every two tokens.
        let fall = unsafe {
            let old = _mm512_loadu_ps(max.as_ptr());
            let new = _mm512_max_ps(old, largest);
            let mut sums = [_mm512_setzero_ps(); 2];
            for (pair, scores) in scores.as_chunks::<2>().0.iter().enumerate() {
                let mut words = [_mm512_setzero_si512(); 2];
                for i in 0..2 {
                    let weight = power(_mm512_sub_ps(_mm512_loadu_ps(scores[i].as_ptr()), new));
                    sums[i] = _mm512_add_ps(sums[i], weight);
                    // No weight is negative or too large to be rounded as an integer.
                    words[i] = _mm512_add_epi32(_mm512_castps_si512(weight), half_mask);
                }
                // The upper halves of both: `(words[0] >> 16) | (words[1] & mask)`.
                let low = _mm512_srli_epi32::<16>(words[0]);
                let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                let line = _mm512_ternarylogic_epi32::<0xf8>(low, words[1], mask);
                _mm512_store_si512(weights.add(pair * size_of::<Line>()).cast(), line);
            }
            // Exactly one where nothing changed: what other lines see must not move this one's bits.
            let same = _mm512_cmpeq_ps_mask(old, new);
            let fall = _mm512_mask_mov_ps(power(_mm512_sub_ps(old, new)), same, _mm512_set1_ps(1.0));
            let total = _mm512_fmadd_ps(
                _mm512_loadu_ps(sum.as_ptr()),
                fall,
                _mm512_add_ps(sums[0], sums[1]),
            );
            _mm512_storeu_ps(sum.as_mut_ptr(), total);
            _mm512_storeu_ps(max.as_mut_ptr(), new);
            fall
        };
        if _mm512_cmpneq_ps_mask(fall, _mm512_set1_ps(1.0)) == 0 {
            return;
        }
        let deep = self.stride / ROWS;
        let sums = self.sums.at(lines / ROWS * deep, deep);
        for element in 0..self.stride {
            // SAFETY: `at` has checked the memory: a line for each element of the head.
            unsafe {
                let p = sums.add(element * size_of::<Line>()).cast::<f32>();
                _mm512_store_ps(p, _mm512_mul_ps(_mm512_load_ps(p), fall));
            }
        }
    }

    /// Adds a block's weighted values to its sums.
    ///
    /// # Safety
    /// Tiles are configured.
    unsafe fn weigh(&mut self, block: usize, groups: Range<usize>) {
        let (deep, count) = (self.stride / ROWS, groups.len());
        let weights = self.weights.at(0, 2 * count);
        let sums = self.sums.at(block * 2 * deep, 2 * deep);
        for d in (0..deep).step_by(2) {
            let values = self.values.at(d * GROUPS + groups.start, GROUPS + count);
            // SAFETY: tiles are configured; `at` has checked the memory; the head has an even number of tiles.
            unsafe {
                let values = [values.cast_const(), values.add(GROUPS * TILE).cast_const()];
                two_by_two(values, weights, count, sums.add(d * TILE), deep * TILE);
            };
        }
    }

    /// See [`Wide::finish`].
    ///
    /// # Safety
    /// The CPU has the table's instruction set.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn finish_inner(&mut self, tile: usize, rows: &mut [f32]) {
        let (stride, deep) = (self.stride, self.stride / ROWS);
        assert_eq!(rows.len(), ROWS * stride, "sixteen lines");
        let sum: &[f32; ROWS] = self.sum[tile * ROWS..].first_chunk().expect("sixteen lines");
        let sums = self.sums.at(tile * deep, deep);
        // SAFETY: sixteen sums.
        let factor = unsafe { _mm512_div_ps(_mm512_set1_ps(1.0), _mm512_loadu_ps(sum.as_ptr())) };
        for d in 0..deep {
            let lines = std::array::from_fn(|element| {
                let at = d * TILE + element * size_of::<Line>();
                // SAFETY: `at` has checked the memory.
                unsafe { _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sums.add(at).cast()), factor)) }
            });
            for (line, row) in transposed(lines).into_iter().zip(rows.chunks_exact_mut(stride)) {
                let out: &mut [f32; ROWS] = row[d * ROWS..].first_chunk_mut().expect("sixteen values");
                // SAFETY: `out` is 64 bytes.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_castsi512_ps(line)) };
            }
        }
    }
}

impl Wide for OnTiles {
    fn deep(&self) -> usize {
        GROUP
    }

    fn largest(&self) -> f32 {
        LARGEST
    }

    fn begin(&mut self, lines: usize, stride: usize) {
        assert!(stride.is_multiple_of(GROUP), "whole groups of a head");
        let lines = lines.next_multiple_of(BLOCK);
        (self.lines, self.stride) = (lines, stride);
        let (wide, deep) = (lines / ROWS, stride / ROWS);
        // Both halves of a group of 32 are tiles of their own here.
        self.queries.resize(wide * deep);
        self.keys.resize(CHUNK / ROWS * deep);
        self.values.resize(deep * GROUPS);
        self.scores.resize(2 * CHUNK / ROWS);
        self.weights.resize(2 * GROUPS);
        self.sums.resize(wide * deep);
        self.sums.0.fill(Line::ZERO);
        self.max.clear();
        self.max.resize(lines, LOWEST);
        self.sum.clear();
        self.sum.resize(lines, 0.0);
    }

    fn queries(&mut self, tile: usize, rows: &[f32], scoring: &Scoring) {
        // SAFETY: a value is made only under a table with tiles.
        unsafe { self.queries_inner(tile, rows, scoring) }
    }

    fn keys(&mut self, group: usize, rows: &[f32]) {
        // SAFETY: a value is made only under a table with tiles.
        unsafe { self.keys_inner(group, rows) }
    }

    fn values(&mut self, group: usize, rows: &[f32]) -> bool {
        // SAFETY: a value is made only under a table with tiles.
        unsafe { self.values_inner(group, rows) }
    }

    fn chunk(&mut self, seen: &[[i32; 2]], scoring: &Scoring) {
        // SAFETY: a value is made only under a table with tiles.
        unsafe { self.chunk_inner(seen, scoring) }
    }

    fn finish(&mut self, tile: usize, rows: &mut [f32]) {
        // SAFETY: a value is made only under a table with tiles.
        unsafe { self.finish_inner(tile, rows) }
    }
}

/// Sixteen low and sixteen high values as 32 bf16 numbers in this order.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16(high: __m512, low: __m512) -> __m512i {
    // SAFETY: both are 64 bytes, and every bit pattern is a valid integer.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) }
}

/// `factor` times 32 values as the sum of two rows of bf16 numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn halves(x: &[f32; GROUP], factor: __m512) -> [__m512i; 2] {
    // SAFETY: `x` is 128 bytes.
    let [low, high] = [0, 16].map(|at| unsafe { _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr().add(at)), factor) });
    let words = bf16(high, low);
    let widened = |words: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)));
    let rest = [
        _mm512_sub_ps(low, widened(_mm512_castsi512_si256(words))),
        _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64::<1>(words))),
    ];
    [words, bf16(rest[1], rest[0])]
}

/// Writes a tile.
///
/// # Safety
/// A tile at `out`, aligned to lines, can be written.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(lines: [__m512i; ROWS], out: *mut u8) {
    for (i, line) in lines.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_si512(out.add(i * size_of::<Line>()).cast(), line) };
    }
}

/// 2^x within 3e-6, for x of at most 0; below [`NEGLIGIBLE`], 0. NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn power(x: __m512) -> __m512 {
    /// x minus the next integer below.
    const FRACTION: i32 = 0x09;
    // Least largest relative error on 0..1.
    const C: [f32; 5] = [
        1.000_002_6,
        0.693_003_83,
        0.241_442_75,
        0.052_011_46,
        0.013_534_17,
    ];
    let f = _mm512_reduce_ps::<FRACTION>(x);
    let mut p = _mm512_set1_ps(C[4]);
    for c in C[..4].iter().rev() {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*c));
    }
    let counts = _mm512_cmpnlt_ps_mask(x, _mm512_set1_ps(NEGLIGIBLE));
    _mm512_maskz_scalef_ps(counts, p, x)
}

/// Brings scores, whose first token is `first` of the chunk, into powers of two, those of unseen tokens to [`UNSEEN`];
/// gives the largest of each line.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
fn prepare_scores(
    scores: &mut [[f32; ROWS]],
    first: i32,
    seen: &[[i32; 2]; ROWS],
    scoring: &Scoring,
) -> __m512 {
    // SAFETY: the features are this function's.
    let s = unsafe { Avx512::new() };
    if let Some(cap) = scoring.softcap {
        let log2_e = s.splat(std::f32::consts::LOG2_E);
        for x in scores.iter_mut() {
            let capped = math::softcap(s, cap, s.load(x));
            s.store(s.mul(capped, log2_e), x);
        }
    }
    let [starts, ends] = [0, 1].map(|i| seen.map(|s| s[i]));
    let all_from = starts.into_iter().max().unwrap_or(0);
    let all_to = ends.into_iter().min().unwrap_or(0);
    // SAFETY: both are 64 bytes of integers.
    let [starts, ends] = [starts, ends].map(|x| unsafe { std::mem::transmute::<[i32; ROWS], __m512i>(x) });
    let mut largest = [s.splat(LOWEST); 2];
    for (group, scores) in scores.as_chunks_mut::<TOKENS>().0.iter_mut().enumerate() {
        let token = first + (group * TOKENS) as i32;
        if token < all_from || token + TOKENS as i32 > all_to {
            for (i, x) in scores.iter_mut().enumerate() {
                let token = _mm512_set1_epi32(token + i as i32);
                let after = _mm512_cmpge_epi32_mask(token, starts);
                let both = _mm512_mask_cmplt_epi32_mask(after, token, ends);
                s.store(_mm512_mask_blend_ps(both, s.splat(UNSEEN), s.load(x)), x);
            }
        }
        for two in scores.as_chunks::<2>().0 {
            for (largest, x) in largest.iter_mut().zip(two) {
                *largest = s.max(*largest, s.load(x));
            }
        }
    }
    s.max(largest[0], largest[1])
}

/// Scores of 32 tokens and 32 lines: keys and queries of `groups` groups of the head, each high and low; two tiles of
/// keys and of queries follow each other. The tiles of the second sixteen tokens go behind those of the first.
///
/// # Safety
/// Tiles are configured; `4 * groups` tiles at `keys` and `queries` can be read, `groups >= 1`; two at each of `out`
/// can be written.
#[inline]
unsafe fn products(keys: *const u8, queries: *const u8, groups: usize, out: [*mut u8; 2]) {
    // SAFETY: the caller promises all memory; every tile register is declared.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            // High keys, low queries.
            "tileloadd tmm4, [{k} + {line}*1]",
            "tileloadd tmm6, [{q} + {line}*1 + 1024]",
            "tileloadd tmm7, [{q2} + {line}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{k2} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // High keys, high queries.
            "tileloadd tmm6, [{q} + {line}*1]",
            "tileloadd tmm7, [{q2} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // Low keys, high queries.
            "tileloadd tmm4, [{k} + {line}*1 + 1024]",
            "tileloadd tmm5, [{k2} + {line}*1 + 1024]",
            "add {k}, 2048",
            "add {k2}, 2048",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {q}, 2048",
            "add {q2}, 2048",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {n}",
            "jnz 2b",
            "tilestored [{s} + {line}*1], tmm0",
            "tilestored [{s2} + {line}*1], tmm1",
            "tilestored [{s} + {line}*1 + 1024], tmm2",
            "tilestored [{s2} + {line}*1 + 1024], tmm3",
            k = inout(reg) keys => _,
            k2 = inout(reg) keys.add(2 * groups * TILE) => _,
            q = inout(reg) queries => _,
            q2 = inout(reg) queries.add(2 * groups * TILE) => _,
            n = inout(reg) groups => _,
            s = in(reg) out[0],
            s2 = in(reg) out[1],
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

const _: () = assert!(TILE_ROWS == ROWS && LINES == ROWS && BLOCK == 2 * ROWS);
const _: () = assert!(TOKENS == GROUP && CHUNK.is_multiple_of(TOKENS));
