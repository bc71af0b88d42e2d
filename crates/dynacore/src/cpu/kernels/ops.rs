//! The table of all leaf kernels that are not matrix products, one constant per instruction set.
//!
//! Each entry is the generic kernel of [`super::generic`] compiled for the set. [`OpTable::of`] gives a set's table
//! only where [`Isa::available`] holds, which is what makes calling the entries sound.

use dynair::{Activation, RopeStyle};

use super::generic;
use super::generic::attention::{Chunk, ChunkOut};
use super::generic::wide::{Panels, Scoring};
use crate::cpu::isa::Isa;
use crate::kv::KvType;

/// Every kernel: name, arguments, generic body. A new one is one line here and its body.
macro_rules! each_kernel {
    ($make:ident $($context:tt)*) => {
        $make! { $($context)*
            /// y = a + b.
            fn add(a: &[f32], b: &[f32], y: &mut [f32]) = generic::elementwise::add;
            /// y = a · b.
            fn mul(a: &[f32], b: &[f32], y: &mut [f32]) = generic::elementwise::mul;
            /// y = c · x.
            fn scale(c: f32, x: &[f32], y: &mut [f32]) = generic::elementwise::scale;
            /// y = c · tanh(x / c).
            fn softcap(c: f32, x: &[f32], y: &mut [f32]) = generic::elementwise::softcap;
            /// y = act(x).
            fn act(act: Activation, x: &[f32], y: &mut [f32]) = generic::elementwise::act;
            /// y = act(gate) · up.
            fn glu(act: Activation, gate: &[f32], up: &[f32], y: &mut [f32]) = generic::elementwise::glu;
            /// y = y · a + x · b.
            fn blend(a: f32, b: f32, x: &[f32], y: &mut [f32]) = generic::elementwise::blend;
            /// One row of RMS norm.
            fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) = generic::norm::rms_norm;
            /// One head turned by its position's angles.
            fn rope(style: RopeStyle, x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) = generic::rope::rope;
            /// One row of the cache, encoded.
            fn store_row(kind: KvType, x: &[f32], out: &mut [u8]) = generic::kv::store_row;
            /// Rows of the cache, decoded, `stride` elements apart.
            fn load_rows(kind: KvType, bytes: &[u8], cols: usize, stride: usize, out: &mut [f32]) = generic::kv::load_rows;
            /// Attention of a few lines over a chunk.
            fn attend(chunk: &Chunk<'_>, out: &mut ChunkOut<'_>) = generic::attention::attend;
            /// Queries of many lines.
            fn wide_queries(panels: &mut Panels, tile: usize, rows: &[f32], scoring: &Scoring) = generic::wide::queries;
            /// Keys for many lines.
            fn wide_keys(panels: &mut Panels, group: usize, rows: &[f32]) = generic::wide::keys;
            /// Values for many lines.
            fn wide_values(panels: &mut Panels, group: usize, rows: &[f32]) = generic::wide::values;
            /// Attention of many lines over a chunk.
            fn wide_chunk(panels: &mut Panels, seen: &[[i32; 2]], scoring: &Scoring) = generic::wide::chunk;
            /// Results of many lines.
            fn wide_finish(panels: &mut Panels, tile: usize, rows: &mut [f32]) = generic::wide::finish;
        }
    };
}

macro_rules! define_table {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) = $body:path;)*) => {
        /// See the module's docs.
        pub(crate) struct OpTable {
            $($name: unsafe fn($($ty),*),)*
        }

        impl OpTable {
            $(
                $(#[$doc])*
                #[inline]
                pub(crate) fn $name(&self, $($arg: $ty),*) {
                    // SAFETY: the entry needs nothing but this table's instruction set, and `OpTable::of` gives a
                    // table only if the CPU has it.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

macro_rules! define_set {
    (
        $features:literal $token:expr;
        $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) = $body:path;)*
    ) => {
        $(
            #[target_feature(enable = $features)]
            fn $name($($arg: $ty),*) {
                // SAFETY: the features the token stands for are those of this function.
                $body(unsafe { $token }, $($arg),*);
            }
        )*

        pub(super) static TABLE: OpTable = OpTable { $($name,)* };
    };
    (
        $token:expr;
        $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) = $body:path;)*
    ) => {
        $(
            fn $name($($arg: $ty),*) {
                $body($token, $($arg),*);
            }
        )*

        pub(super) static TABLE: OpTable = OpTable { $($name,)* };
    };
}

each_kernel!(define_table);

mod portable {
    use super::*;
    use crate::cpu::kernels::simd::portable::Portable;
    each_kernel!(define_set Portable;);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::cpu::kernels::simd::avx2::Avx2;
    each_kernel!(define_set "avx2,fma,f16c" Avx2::new(););
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::*;
    use crate::cpu::kernels::simd::avx512::Avx512;
    each_kernel!(define_set "avx2,fma,f16c,avx512f,avx512bw,avx512vl" Avx512::new(););
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::*;
    use crate::cpu::kernels::simd::neon::Neon;
    each_kernel!(define_set "neon" Neon::new(););
}

impl OpTable {
    /// The table of an instruction set; `None` if this CPU lacks it.
    pub(crate) fn of(isa: Isa) -> Option<&'static OpTable> {
        if !isa.available() {
            return None;
        }
        match isa {
            Isa::Portable => Some(&portable::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => Some(&avx2::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => Some(&avx512::TABLE),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Amx => None,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::Dotprod | Isa::I8mm => Some(&neon::TABLE),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::Dotprod | Isa::I8mm => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What FNV-1a makes of bytes.
    fn fingerprint(bytes: impl IntoIterator<Item = u8>) -> u64 {
        bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    fn bits(values: &[f32]) -> impl Iterator<Item = u8> + '_ {
        values.iter().flat_map(|v| v.to_bits().to_le_bytes())
    }

    /// Results of every kernel that treats elements alike, and of the norm.
    fn results(t: &OpTable) -> (u64, u64) {
        const N: usize = 352;
        let x: Vec<f32> = (0..N).map(|i| (i as f32 - 170.5) * 0.061).collect();
        let w: Vec<f32> = (0..N).map(|i| (i * 37 % 101) as f32 * 0.02 - 1.0).collect();
        let (mut y, mut all) = (vec![0.0; N], Vec::new());
        for act in [
            Activation::Silu,
            Activation::GeluTanh,
            Activation::Gelu,
            Activation::Relu,
        ] {
            t.act(act, &x, &mut y);
            all.extend(bits(&y));
            t.glu(act, &x, &w, &mut y);
            all.extend(bits(&y));
        }
        t.softcap(3.0, &x, &mut y);
        t.blend(0.3, 1.7, &w, &mut y);
        all.extend(bits(&y));
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            t.rope(style, &x, &w[..100], &w[100..200], &mut y);
            all.extend(bits(&y));
        }
        for kind in [KvType::F32, KvType::F16, KvType::Q8_0] {
            let mut row = vec![0; kind.bytes(N).expect("whole blocks")];
            t.store_row(kind, &x, &mut row);
            all.extend(row);
        }
        t.rms_norm(&x, &w, 1e-5, &mut y);
        (fingerprint(all), fingerprint(bits(&y)))
    }

    /// Of the elements' bits and of the norm's, recorded under AVX2.
    const FINGERPRINTS: (u64, u64) = (0x6d06_4480_c2f3_524c, 0x941b_68d3_a8ad_2825);

    /// Sets with fused multiply-adds agree on elements, those with vectors of eight lanes on sums too, on whatever
    /// machine. A change of the arithmetic that is meant changes the figures: take those that the failure prints.
    #[test]
    fn results_have_the_same_bits_on_every_architecture() {
        for isa in Isa::ALL.into_iter().filter(|isa| *isa != Isa::Portable) {
            let Some(table) = OpTable::of(isa) else { continue };
            let (elements, norm) = results(table);
            assert_eq!(elements, FINGERPRINTS.0, "{isa}: {elements:#018x}");
            if !matches!(isa, Isa::Avx512 | Isa::Amx) {
                assert_eq!(norm, FINGERPRINTS.1, "{isa}: {norm:#018x}");
            }
        }
    }
}
