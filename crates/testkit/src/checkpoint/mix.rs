//! Which tensor of a checkpoint gets which type.
//!
//! A plain type applies to every matrix. A mix, as published files are made, gives more bits to the tensors whose
//! errors hurt most: the output projection, the values, and the FFN down projection of some layers. The rules are those by
//! which llama.cpp's quantiser makes files of the same names.

use dynair::{DType, QuantType};

/// A plain type or a named mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mix {
    name: &'static str,
    base: DType,
    /// `general.file_type`.
    file_type: u32,
    size: Option<Size>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    Medium,
    Large,
}

const Q2_K: DType = DType::Quant(QuantType::Q2K);
const Q3_K: DType = DType::Quant(QuantType::Q3K);
const Q4_K: DType = DType::Quant(QuantType::Q4K);
const Q5_K: DType = DType::Quant(QuantType::Q5K);
const Q6_K: DType = DType::Quant(QuantType::Q6K);

const fn plain(base: DType, file_type: u32) -> Mix {
    Mix {
        name: base.name(),
        base,
        file_type,
        size: None,
    }
}

const fn mixed(name: &'static str, base: DType, file_type: u32, size: Size) -> Mix {
    Mix {
        name,
        base,
        file_type,
        size: Some(size),
    }
}

impl Mix {
    /// Every mix.
    pub const ALL: [Mix; 23] = [
        plain(DType::F32, 0),
        plain(DType::F16, 1),
        plain(DType::Bf16, 32),
        plain(DType::Quant(QuantType::Q4_0), 2),
        plain(DType::Quant(QuantType::Q4_1), 3),
        plain(DType::Quant(QuantType::Q5_0), 8),
        plain(DType::Quant(QuantType::Q5_1), 9),
        plain(DType::Quant(QuantType::Q8_0), 7),
        plain(Q2_K, 10),
        plain(Q3_K, 11),
        plain(Q4_K, 14),
        plain(Q5_K, 16),
        plain(Q6_K, 18),
        plain(DType::Quant(QuantType::Iq4Nl), 25),
        plain(DType::Quant(QuantType::Iq4Xs), 30),
        plain(DType::Quant(QuantType::Mxfp4), 38),
        mixed("Q3_K_S", Q3_K, 11, Size::Small),
        mixed("Q3_K_M", Q3_K, 12, Size::Medium),
        mixed("Q3_K_L", Q3_K, 13, Size::Large),
        mixed("Q4_K_S", Q4_K, 14, Size::Small),
        mixed("Q4_K_M", Q4_K, 15, Size::Medium),
        mixed("Q5_K_S", Q5_K, 16, Size::Small),
        mixed("Q5_K_M", Q5_K, 17, Size::Medium),
    ];

    /// The mix of that name, ignoring case.
    pub fn named(name: &str) -> Option<Mix> {
        Mix::ALL.into_iter().find(|m| m.name.eq_ignore_ascii_case(name))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The `general.file_type` of such a file.
    pub fn file_type(self) -> u32 {
        self.file_type
    }

    /// The type of matrix `name` with rows of `cols` elements. `layer` is its block, `layers` the number of blocks;
    /// `tied` says whether the embedding serves as output projection too.
    ///
    /// Where `cols` is no whole number of the type's blocks, a type of shorter blocks and at least as many bits takes
    /// its place, at last F16.
    pub fn dtype(self, name: &str, cols: usize, layer: usize, layers: usize, tied: bool) -> DType {
        let is = |part: &str| name.contains(part);
        let dtype = match self.size {
            None => self.base,
            Some(_) if name == "output.weight" || tied && name == "token_embd.weight" => Q6_K,
            Some(size) if is("attn_v.") => self.values(size, layer, layers),
            Some(size) if is("ffn_down.") || is("ffn_down_exps.") => self.down(size, layer, layers),
            Some(Size::Medium) if is("attn_output.") && self.base == Q3_K => Q4_K,
            Some(Size::Large) if is("attn_output.") => Q5_K,
            Some(_) => self.base,
        };
        let mut fitting = dtype;
        while fitting.row_bytes(cols).is_none() {
            fitting = DType::Quant(match fitting {
                DType::Quant(QuantType::Q2K | QuantType::Q3K) => QuantType::Q4_0,
                DType::Quant(QuantType::Q4K) => QuantType::Q5_0,
                DType::Quant(QuantType::Q5K) => QuantType::Q5_1,
                DType::Quant(QuantType::Q6K) => QuantType::Q8_0,
                DType::Quant(QuantType::Iq4Xs) => QuantType::Iq4Nl,
                _ => return DType::F16,
            });
        }
        fitting
    }

    fn values(self, size: Size, layer: usize, layers: usize) -> DType {
        match (self.base, size) {
            (Q3_K, Size::Medium) if layer < 2 => Q5_K,
            (Q3_K, Size::Medium) => Q4_K,
            (Q3_K, Size::Large) => Q5_K,
            (Q4_K, Size::Small) if layer < 4 => Q5_K,
            (_, Size::Medium) if more_bits(layer, layers) => Q6_K,
            (base, _) => base,
        }
    }

    fn down(self, size: Size, layer: usize, layers: usize) -> DType {
        match (self.base, size) {
            (Q3_K, Size::Medium) if layer < layers / 16 => Q5_K,
            (Q3_K, Size::Medium) if more_bits(layer, layers) => Q4_K,
            (Q3_K, Size::Medium) => Q3_K,
            (Q3_K, Size::Large) => Q5_K,
            (Q4_K, Size::Small) if layer < layers / 8 => Q5_K,
            (_, Size::Medium) if more_bits(layer, layers) => Q6_K,
            (base, _) => base,
        }
    }
}

/// The layers of the first and last eighth, and every third of those between.
fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The types of a published file: Gemma 3 270M as Q4_K_M, whose rows of 640 do not divide into blocks of 256.
    #[test]
    fn a_published_mix_is_met() {
        let mix = Mix::named("q4_k_m").unwrap();
        let more = [0, 1, 4, 7, 10, 13, 15, 16, 17];
        for layer in 0..18 {
            let of = |name: &str, cols| {
                mix.dtype(&format!("blk.{layer}.{name}.weight"), cols, layer, 18, true)
                    .name()
            };
            let has_more = more.contains(&layer);
            assert_eq!(
                of("attn_v", 640),
                if has_more { "Q8_0" } else { "Q5_0" },
                "{layer}"
            );
            assert_eq!(
                of("ffn_down", 2048),
                if has_more { "Q6_K" } else { "Q4_K" },
                "{layer}"
            );
            assert_eq!(
                (of("attn_output", 1024), of("attn_q", 640), of("ffn_up", 640)),
                ("Q4_K", "Q5_0", "Q5_0")
            );
        }
        assert_eq!(mix.dtype("token_embd.weight", 640, 0, 18, true).name(), "Q8_0");
        assert_eq!(mix.dtype("token_embd.weight", 2048, 0, 18, false).name(), "Q4_K");
        assert_eq!(mix.dtype("output.weight", 2048, 0, 18, false).name(), "Q6_K");
    }

    #[test]
    fn plain_types_apply_to_all_and_odd_rows_fall_back() {
        let q8 = Mix::named("Q8_0").unwrap();
        assert_eq!(q8.dtype("blk.0.ffn_down.weight", 64, 0, 2, true).name(), "Q8_0");
        assert_eq!(q8.dtype("blk.0.ffn_down.weight", 40, 0, 2, true).name(), "F16");
        assert_eq!(
            Mix::named("Q2_K")
                .unwrap()
                .dtype("blk.0.attn_q.weight", 128, 0, 2, true)
                .name(),
            "Q4_0"
        );
        let iq4 = Mix::named("IQ4_XS").unwrap();
        assert_eq!(iq4.dtype("blk.0.attn_q.weight", 512, 0, 2, true).name(), "IQ4_XS");
        assert_eq!(iq4.dtype("blk.0.attn_q.weight", 96, 0, 2, true).name(), "IQ4_NL");
        assert!(Mix::named("Q9_X").is_none());
        assert!(DType::WEIGHTS.iter().all(|t| Mix::named(t.name()).is_some()));
    }
}
