//! Random numbers that are a function of a seed and a position, without state.
//!
//! The n-th draw of a sequence needs no draw before it, so preemption, recomputation and drafts cannot shift
//! it. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to seed and
//! position in turn.

/// 64 random bits for draw number `position` of a sequence with this seed.
pub fn bits(seed: u64, position: u64) -> u64 {
    mix(mix(seed.wrapping_add(GAMMA)).wrapping_add(position.wrapping_mul(GAMMA)))
}

/// A uniform integer in `0..total`; 0 if `total` is 0. Biased by less than `total / 2^64`.
pub fn below(seed: u64, position: u64, total: u64) -> u64 {
    ((u128::from(bits(seed, position)) * u128::from(total)) >> 64) as u64
}

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
