//! What the bytes of every weight type mean: scalar decode and encode of whole rows.
//!
//! This is the definition that every kernel, repacking and model maker of the project is held against. It owns the
//! formats of [`DType::WEIGHTS`]; it knows nothing of files, layouts of devices or speed. [`legacy`] holds the types of
//! 32 elements a block, [`k`] those of 256, [`table`] those whose codes index a table, and [`fit`] the least-squares
//! searches that encoders need.
//!
//! Decoding performs exactly the single-precision operations, in the order, that the reference implementation of the
//! formats performs (the Python `gguf` package), so the results are bit-identical with it; only the payload of a NaN
//! may differ. Encoding is bit-identical with it for F16, BF16, the legacy types and MXFP4. It has no encoder for
//! the K types, IQ4_NL and IQ4_XS; ours minimise the squared error of each sub-block.
//!
//! # Byte layouts
//!
//! All numbers are little-endian; `f16` is IEEE binary16. Each layout stands with its decoder. Source: the GGML type
//! table (`ggml-common.h` of ggml, `gguf/quants.py` of the Python package `gguf`).
//!
//! # Values that have no code
//!
//! F32, F16 and BF16 store NaN and infinities as such (F16 turns magnitudes from 65520 on into infinities). A block
//! type has no code for them, and its scale is an `f16` (but MXFP4's, whose scales reach beyond `f32`): encoding a NaN, an infinity or a block whose scale or minimum
//! exceeds the range of `f16` is an error that names the element or block. Scales too small for `f16` become zero, and
//! with them the block.

use half::{bf16, f16};

use crate::dtype::{DType, QuantType};
use crate::error::{Error, Result};

mod fit;
pub mod k;
pub mod legacy;
pub mod table;
#[cfg(test)]
mod tests;

/// Decodes a row (or any run of whole blocks) of `out.len()` elements.
///
/// # Errors
/// [`Error::ByteLength`] if `bytes` does not have the length these elements take, [`Error::BadInput`] if they are no
/// whole number of blocks or `dtype` is no weight type.
pub fn decode_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let expected = row_bytes("decode", dtype, out.len())?;
    if bytes.len() != expected {
        return Err(Error::ByteLength {
            dtype: dtype.name(),
            elements: out.len(),
            expected,
            found: bytes.len(),
        });
    }
    match dtype {
        DType::F32 => each(bytes, out, |b: [u8; 4]| f32::from_le_bytes(b)),
        DType::F16 => each(bytes, out, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
        DType::Bf16 => each(bytes, out, |b: [u8; 2]| {
            f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
        }),
        DType::I32 => unreachable!("row_bytes refuses types that are no weight type"),
        DType::Quant(q) => match q {
            QuantType::Q4_0 => blocks(bytes, out, legacy::decode_q4_0),
            QuantType::Q4_1 => blocks(bytes, out, legacy::decode_q4_1),
            QuantType::Q5_0 => blocks(bytes, out, legacy::decode_q5_0),
            QuantType::Q5_1 => blocks(bytes, out, legacy::decode_q5_1),
            QuantType::Q8_0 => blocks(bytes, out, legacy::decode_q8_0),
            QuantType::Q2K => blocks(bytes, out, k::decode_q2_k),
            QuantType::Q3K => blocks(bytes, out, k::decode_q3_k),
            QuantType::Q4K => blocks(bytes, out, k::decode_q4_k),
            QuantType::Q5K => blocks(bytes, out, k::decode_q5_k),
            QuantType::Q6K => blocks(bytes, out, k::decode_q6_k),
            QuantType::Iq4Nl => blocks(bytes, out, table::decode_iq4_nl),
            QuantType::Iq4Xs => blocks(bytes, out, table::decode_iq4_xs),
            QuantType::Mxfp4 => blocks(bytes, out, table::decode_mxfp4),
        },
    }
    Ok(())
}

/// Encodes a row (or any run of whole blocks) and appends its bytes to `out`.
///
/// On an error `out` is left as it was.
///
/// # Errors
/// [`Error::BadInput`] if the values are no whole number of blocks, if `dtype` is no weight type, or if a value has no
/// code in a block type (see the module's text).
pub fn encode_row(dtype: DType, values: &[f32], out: &mut Vec<u8>) -> Result<()> {
    let bytes = row_bytes("encode", dtype, values.len())?;
    let start = out.len();
    out.reserve(bytes);
    let done = match dtype {
        DType::F32 => {
            out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            Ok(())
        }
        DType::F16 => {
            out.extend(values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()));
            Ok(())
        }
        DType::Bf16 => {
            out.extend(values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()));
            Ok(())
        }
        DType::I32 => unreachable!("row_bytes refuses types that are no weight type"),
        DType::Quant(q) => encode_blocks(q, values, out),
    };
    if done.is_err() {
        out.truncate(start);
    }
    done
}

/// The row as a new vector of `elements` values.
///
/// # Errors
/// As [`decode_row`].
pub fn decode(dtype: DType, bytes: &[u8], elements: usize) -> Result<Vec<f32>> {
    // Checked before the allocation, so that a false `elements` costs nothing.
    let expected = row_bytes("decode", dtype, elements)?;
    if bytes.len() != expected {
        return Err(Error::ByteLength {
            dtype: dtype.name(),
            elements,
            expected,
            found: bytes.len(),
        });
    }
    let mut out = vec![0.0; elements];
    decode_row(dtype, bytes, &mut out)?;
    Ok(out)
}

/// The encoded bytes as a new vector.
///
/// # Errors
/// As [`encode_row`].
pub fn encode(dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    encode_row(dtype, values, &mut out)?;
    Ok(out)
}

fn row_bytes(what: &str, dtype: DType, elements: usize) -> Result<usize> {
    if !DType::WEIGHTS.contains(&dtype) {
        return Err(Error::BadInput {
            op: what.into(),
            what: "type".into(),
            found: dtype.name().into(),
            expected: "a weight type".into(),
        });
    }
    dtype.row_bytes(elements).ok_or_else(|| Error::BadInput {
        op: format!("{what} {dtype}"),
        what: "number of elements".into(),
        found: elements.to_string(),
        expected: format!("a multiple of {}", dtype.block().0),
    })
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (b, v) in bytes.as_chunks::<N>().0.iter().zip(out) {
        *v = decode(*b);
    }
}

fn blocks<const BYTES: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; N]),
) {
    for (b, v) in bytes
        .as_chunks::<BYTES>()
        .0
        .iter()
        .zip(out.as_chunks_mut::<N>().0)
    {
        decode(b, v);
    }
}

fn encode_blocks(q: QuantType, values: &[f32], out: &mut Vec<u8>) -> Result<()> {
    let name = DType::Quant(q).name();
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        return Err(Error::BadInput {
            op: format!("encode {name}"),
            what: format!("element {at}"),
            found: values[at].to_string(),
            expected: "a finite value".into(),
        });
    }
    let overflow = |at: usize, n: usize, scale: f32| Error::BadInput {
        op: format!("encode {name}"),
        what: format!("scale of block {at} (elements {} to {})", at * n, at * n + n - 1),
        found: scale.to_string(),
        expected: "a magnitude that fits f16 (up to 65504)".into(),
    };
    macro_rules! run {
        ($encode:path, $n:literal) => {
            for (at, block) in values.as_chunks::<$n>().0.iter().enumerate() {
                let bytes = $encode(block).map_err(|ScaleOverflow(scale)| overflow(at, $n, scale))?;
                out.extend_from_slice(&bytes);
            }
        };
    }
    match q {
        QuantType::Q4_0 => run!(legacy::encode_q4_0, 32),
        QuantType::Q4_1 => run!(legacy::encode_q4_1, 32),
        QuantType::Q5_0 => run!(legacy::encode_q5_0, 32),
        QuantType::Q5_1 => run!(legacy::encode_q5_1, 32),
        QuantType::Q8_0 => run!(legacy::encode_q8_0, 32),
        QuantType::Q2K => run!(k::encode_q2_k, 256),
        QuantType::Q3K => run!(k::encode_q3_k, 256),
        QuantType::Q4K => run!(k::encode_q4_k, 256),
        QuantType::Q5K => run!(k::encode_q5_k, 256),
        QuantType::Q6K => run!(k::encode_q6_k, 256),
        QuantType::Iq4Nl => run!(table::encode_iq4_nl, 32),
        QuantType::Iq4Xs => run!(table::encode_iq4_xs, 256),
        QuantType::Mxfp4 => run!(table::encode_mxfp4, 32),
    }
    Ok(())
}

/// A scale or minimum (the value) that is too large for `f16`.
struct ScaleOverflow(f32);

/// The `f16` at `at`.
fn get_f16(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Stores `value` as an `f16` at `at` and returns what is stored.
fn put_f16(block: &mut [u8], at: usize, value: f32) -> Result<f32, ScaleOverflow> {
    let half = f16::from_f32(value);
    if !half.is_finite() {
        return Err(ScaleOverflow(value));
    }
    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
    Ok(half.to_f32())
}
