//! Random numbers that are the same on every machine: integers and sums of integers only, no library function.

/// SplitMix64 (Steele, Lea and Flood 2014): a counter through a mixing function.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed` alone.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The sequence of `seed` and `name`: what is drawn for one name does not depend on what others draw.
    pub fn named(seed: u64, name: &str) -> Random {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        });
        Random(Random(seed ^ hash).bits())
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "there is no number below 0");
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// A nearly normal number of mean 0 and deviation 1: the sum of twelve uniform ones, so within -6 and 6.
    pub fn normal(&mut self) -> f32 {
        let sum: i32 = (0..3)
            .map(|_| {
                let bits = self.bits();
                (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as i32).sum::<i32>()
            })
            .sum();
        // Twelve numbers of 0..=65535 have the mean 6 * 65535 and the deviation 65536 (but for one part in 2^32).
        (sum - 6 * 65535) as f32 / 65536.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_the_moments_of_a_normal_distribution() {
        let mut random = Random::named(3, "x");
        let n = 1 << 16;
        let x: Vec<f64> = (0..n).map(|_| random.normal().into()).collect();
        let moment = |p| x.iter().map(|v| v.powi(p)).sum::<f64>() / f64::from(n);
        // Standard errors at n = 65536: 0.004, 0.006; the fourth moment of the sum of twelve is 2.9.
        assert!(moment(1).abs() < 0.02, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.03, "{}", moment(2));
        assert!((moment(4) - 2.9).abs() < 0.3, "{}", moment(4));
    }

    #[test]
    fn sequences_are_told_apart_and_repeat() {
        let draw = |seed, name| Random::named(seed, name).bits();
        assert_eq!(draw(1, "a"), draw(1, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
        assert_ne!(draw(1, "a"), draw(2, "a"));
        let mut random = Random::new(0);
        assert_eq!(
            random.bits(),
            0xe220_a839_7b1d_cdaf,
            "the first number of SplitMix64 with seed 0"
        );
        assert!((0..1000).map(|_| random.below(7)).all(|n| n < 7));
    }
}
