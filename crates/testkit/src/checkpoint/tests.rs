//! Made checkpoints: complete, sane, and the same each time.

use super::*;

const FAMILIES: [&str; 8] = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "qwen3moe",
    "granite",
    "granitemoe",
];

fn all_bytes(checkpoint: &Checkpoint) -> Vec<u8> {
    let mut bytes = Vec::new();
    let Ok(()) = checkpoint.write(|b| {
        bytes.extend_from_slice(b);
        Ok::<(), std::convert::Infallible>(())
    });
    bytes
}

#[test]
fn tiny_checkpoints_are_small_and_the_same_each_time() {
    for family in FAMILIES {
        let make = |mix, seed| tiny(family, Mix::named(mix).unwrap(), seed);
        let size: usize = make("Q4_K_M", 1).tensors.iter().map(TensorSpec::bytes).sum();
        assert!(size < 2_000_000, "{family} takes {size} bytes");
        let checkpoint = make("Q8_0", 1);
        let bytes = all_bytes(&checkpoint);
        assert_eq!(
            bytes.len(),
            checkpoint.tensors.iter().map(TensorSpec::bytes).sum::<usize>()
        );
        assert!(bytes == all_bytes(&make("Q8_0", 1)));
        assert!(bytes != all_bytes(&make("Q8_0", 2)));
        let mut at = 0;
        for t in &checkpoint.tensors {
            assert!(
                bytes[at..at + t.bytes()] == checkpoint.tensor_bytes(t),
                "{}",
                t.name
            );
            at += t.bytes();
        }
    }
}

#[test]
fn every_shape_and_mix_gives_a_table() {
    for shape in SHAPES {
        let vocab = Vocab {
            metadata: Vec::new(),
            size: shape.vocab_size,
        };
        for mix in Mix::ALL {
            let checkpoint = make(shape, mix, 0, &vocab);
            let mut names: Vec<_> = checkpoint.tensors.iter().map(|t| &t.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(
                names.len(),
                checkpoint.tensors.len(),
                "{}: a name stands twice",
                shape.name
            );
            assert!(checkpoint.tensors.iter().all(|t| t.bytes() > 0));
        }
        assert_eq!(ModelShape::named(shape.name), Some(*shape));
    }
}

/// The published numbers of parameters, counted without biases and norms by their makers' rounding.
#[test]
fn real_shapes_have_their_published_number_of_parameters() {
    for (name, millions) in [
        ("qwen2.5-0.5b", 494.0),
        ("qwen2.5-1.5b", 1543.7),
        ("qwen2.5-7b", 7615.6),
        ("qwen3-0.6b", 596.0),
        ("qwen3-1.7b", 1720.6),
        ("qwen3-4b", 4022.5),
        ("qwen3-8b", 8190.7),
        ("llama3.2-1b", 1235.8),
        ("llama3.2-3b", 3212.7),
        ("llama3.1-8b", 8030.3),
        ("smollm2-135m", 134.5),
        ("gemma2-2b", 2614.3),
        ("gemma3-270m", 268.1),
        ("gemma3-1b", 999.9),
        ("gemma3-4b", 3880.0),
        ("qwen3-30b-a3b", 30_532.1),
        ("granite3.1-2b", 2533.5),
        ("granite3.1-1b-a400m", 1334.6),
    ] {
        let shape = ModelShape::named(name).unwrap();
        let vocab = Vocab {
            metadata: Vec::new(),
            size: shape.vocab_size,
        };
        let checkpoint = make(&shape, Mix::named("F32").unwrap(), 0, &vocab);
        let found = checkpoint.tensors.iter().map(TensorSpec::elements).sum::<usize>() as f64 / 1e6;
        assert!(
            (found / millions - 1.0).abs() < 2e-3,
            "{name} has {found} million parameters, not {millions}"
        );
    }
}

#[test]
fn large_tensors_come_from_the_pool_with_the_wanted_deviation() {
    let shape = ModelShape {
        layers: 1,
        ..ModelShape::named("smollm2-135m").unwrap()
    };
    let checkpoint = make(
        &shape,
        Mix::named("Q8_0").unwrap(),
        7,
        &Vocab {
            metadata: Vec::new(),
            size: 512,
        },
    );
    let t = checkpoint
        .tensors
        .iter()
        .find(|t| t.name == "blk.0.ffn_up.weight")
        .unwrap();
    assert!(t.elements() > FRESH);
    let values = quant::decode(t.dtype, &checkpoint.tensor_bytes(t), t.elements()).unwrap();
    let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
    assert!((square * 576.0 - 1.0).abs() < 0.02, "{square}");
    let rows: Vec<&[f32]> = values.chunks_exact(576).collect();
    let equal = (1..rows.len()).filter(|&i| rows[i] == rows[i - 1]).count();
    assert_eq!(equal, 0, "neighbouring rows differ");
}

#[test]
fn llama3_factors_keep_high_frequencies_and_divide_low_ones() {
    let f = llama3_factors(500_000.0, 64, 32.0, 8192.0);
    assert_eq!((f.len(), f[0], f[31]), (32, 1.0, 32.0));
    assert!(f.windows(2).all(|w| w[0] <= w[1]));
    // Frequency 500000^(-30/64) turns 2.777 times in 8192 tokens: 0.592 of the way from 1 to 4 turns.
    assert!(
        (f64::from(f[15]) - 1.0 / ((1.0 - 0.5923) / 32.0 + 0.5923)).abs() < 2e-3,
        "{}",
        f[15]
    );
}

#[test]
fn families_have_their_own_tensors_and_keys() {
    let has = |c: &Checkpoint, name: &str| c.tensors.iter().any(|t| t.name == name);
    let f32_mix = Mix::named("F32").unwrap();
    let llama = tiny("llama", f32_mix, 0);
    assert!(
        has(&llama, "output.weight") && has(&llama, "rope_freqs.weight") && !has(&llama, "blk.0.attn_q.bias")
    );
    let qwen2 = tiny("qwen2", f32_mix, 0);
    assert!(has(&qwen2, "blk.1.attn_k.bias") && !has(&qwen2, "output.weight"));
    assert!(has(&tiny("qwen3", f32_mix, 0), "blk.1.attn_k_norm.weight"));
    let moe = tiny("granitemoe", Mix::named("Q4_K_M").unwrap(), 0);
    let stacked = moe
        .tensors
        .iter()
        .find(|t| t.name == "blk.1.ffn_up_exps.weight")
        .unwrap();
    assert_eq!(
        (stacked.dims.as_slice(), stacked.dtype.name()),
        (&[256, 64, 6][..], "Q4_K")
    );
    let router = moe
        .tensors
        .iter()
        .find(|t| t.name == "blk.1.ffn_gate_inp.weight")
        .unwrap();
    assert_eq!(
        (router.dims.as_slice(), router.dtype),
        (&[256, 6][..], DType::F32)
    );
    assert!(!has(&moe, "blk.1.ffn_up.weight"));
    assert_eq!(moe.get("granitemoe.expert_used_count"), Some(&Meta::U32(2)));
    let gemma2 = tiny("gemma2", f32_mix, 0);
    assert!(has(&gemma2, "blk.3.post_ffw_norm.weight") && !has(&gemma2, "blk.0.attn_q_norm.weight"));
    assert_eq!(
        gemma2.get("gemma2.final_logit_softcapping"),
        Some(&Meta::F32(30.0))
    );
    let gemma3 = tiny("gemma3", f32_mix, 0);
    assert!(has(&gemma3, "blk.5.attn_q_norm.weight") && has(&gemma3, "blk.5.post_attention_norm.weight"));
    assert_eq!(
        gemma3.get("gemma3.attention.sliding_window"),
        Some(&Meta::U32(16))
    );
}
