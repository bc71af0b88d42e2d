//! Element types of tensors and the block geometry of the quantised ones.
//!
//! The formats are those of the GGML type table; what their bytes mean is defined in [`crate::quant`].

use std::fmt;

/// A block-quantised weight type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QuantType {
    /// 32 × 4 bit, one f16 scale; value = d·(q − 8).
    Q4_0,
    /// 32 × 4 bit, f16 scale and minimum; value = d·q + m.
    Q4_1,
    /// 32 × 5 bit, one f16 scale; value = d·(q − 16).
    Q5_0,
    /// 32 × 5 bit, f16 scale and minimum; value = d·q + m.
    Q5_1,
    /// 32 × 8 bit signed, one f16 scale.
    Q8_0,
    /// 256 × 2 bit, 16 sub-blocks with 4-bit scale and minimum.
    Q2K,
    /// 256 × 3 bit, 16 sub-blocks with 6-bit scale.
    Q3K,
    /// 256 × 4 bit, 8 sub-blocks with 6-bit scale and minimum.
    Q4K,
    /// 256 × 5 bit, 8 sub-blocks with 6-bit scale and minimum.
    Q5K,
    /// 256 × 6 bit, 16 sub-blocks with 8-bit scale.
    Q6K,
    /// 32 × 4 bit that index a table of signed bytes, one f16 scale; value = d·table\[q\].
    Iq4Nl,
    /// 256 × 4 bit that index the same table, 8 sub-blocks with 6-bit scale.
    Iq4Xs,
    /// 32 floats of 4 bit (E2M1) with a power of two in 8 bit (E8M0) as scale: OCP microscaling's MXFP4.
    Mxfp4,
}

impl QuantType {
    /// Every quantised type, in the order of the enum.
    pub const ALL: [QuantType; 13] = [
        QuantType::Q4_0,
        QuantType::Q4_1,
        QuantType::Q5_0,
        QuantType::Q5_1,
        QuantType::Q8_0,
        QuantType::Q2K,
        QuantType::Q3K,
        QuantType::Q4K,
        QuantType::Q5K,
        QuantType::Q6K,
        QuantType::Iq4Nl,
        QuantType::Iq4Xs,
        QuantType::Mxfp4,
    ];
}

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// 32-bit signed integers (token ids, positions).
    I32,
    /// A block-quantised weight type.
    Quant(QuantType),
}

impl DType {
    /// Every type a weight may have.
    pub const WEIGHTS: [DType; 16] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::Quant(QuantType::Q4_0),
        DType::Quant(QuantType::Q4_1),
        DType::Quant(QuantType::Q5_0),
        DType::Quant(QuantType::Q5_1),
        DType::Quant(QuantType::Q8_0),
        DType::Quant(QuantType::Q2K),
        DType::Quant(QuantType::Q3K),
        DType::Quant(QuantType::Q4K),
        DType::Quant(QuantType::Q5K),
        DType::Quant(QuantType::Q6K),
        DType::Quant(QuantType::Iq4Nl),
        DType::Quant(QuantType::Iq4Xs),
        DType::Quant(QuantType::Mxfp4),
    ];

    /// `(elements, bytes)` of one block; plain types have blocks of one element.
    pub const fn block(self) -> (usize, usize) {
        match self {
            DType::F32 | DType::I32 => (1, 4),
            DType::F16 | DType::Bf16 => (1, 2),
            DType::Quant(q) => match q {
                QuantType::Q4_0 => (32, 18),
                QuantType::Q4_1 => (32, 20),
                QuantType::Q5_0 => (32, 22),
                QuantType::Q5_1 => (32, 24),
                QuantType::Q8_0 => (32, 34),
                QuantType::Q2K => (256, 84),
                QuantType::Q3K => (256, 110),
                QuantType::Q4K => (256, 144),
                QuantType::Q5K => (256, 176),
                QuantType::Q6K => (256, 210),
                QuantType::Iq4Nl => (32, 18),
                QuantType::Iq4Xs => (256, 136),
                QuantType::Mxfp4 => (32, 17),
            },
        }
    }

    /// Bytes of a row of `elements`, or `None` where that is no whole number of blocks or overflows.
    pub const fn row_bytes(self, elements: usize) -> Option<usize> {
        let (n, bytes) = self.block();
        if !elements.is_multiple_of(n) {
            return None;
        }
        (elements / n).checked_mul(bytes)
    }

    /// The field's name of the type, as users know it (`Q4_K`, `F16`).
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
            DType::I32 => "I32",
            DType::Quant(q) => match q {
                QuantType::Q4_0 => "Q4_0",
                QuantType::Q4_1 => "Q4_1",
                QuantType::Q5_0 => "Q5_0",
                QuantType::Q5_1 => "Q5_1",
                QuantType::Q8_0 => "Q8_0",
                QuantType::Q2K => "Q2_K",
                QuantType::Q3K => "Q3_K",
                QuantType::Q4K => "Q4_K",
                QuantType::Q5K => "Q5_K",
                QuantType::Q6K => "Q6_K",
                QuantType::Iq4Nl => "IQ4_NL",
                QuantType::Iq4Xs => "IQ4_XS",
                QuantType::Mxfp4 => "MXFP4",
            },
        }
    }

    /// The inverse of [`DType::name`], ignoring case.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::WEIGHTS
            .into_iter()
            .chain([DType::I32])
            .find(|t| t.name().eq_ignore_ascii_case(name))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
