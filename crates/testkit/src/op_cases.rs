//! The grid of op cases that devices are held against the evaluator with: every op, sizes of one, odd, around block
//! sizes and large, values tiny, huge and mixed.

use dynacore::KvType;
use dynacore::cpu::ops::linear::Form;
use dynacore::self_test::Case;
use dynacore::self_test::cases::{
    Attention, Experts, Values, attention, elementwise, experts, from, linear, norm, rope, rope_scaled,
    wide_attention,
};
use dynair::{DType, ExpertWeights, QuantType, RopeScaling, RopeStyle};

/// All kinds of values.
pub const VALUES: [Values; 4] = [Values::Normal, Values::Tiny, Values::Huge, Values::Mixed];

/// Element-wise ops, embedding and output rows.
pub fn elementwise_cases() -> Vec<Case> {
    let sizes = [(1, 1), (1, 7), (3, 8), (5, 17), (2, 4097), (33, 576)];
    let all = sizes
        .iter()
        .flat_map(|(n, cols)| VALUES.map(|v| elementwise(*n, *cols, v)));
    all.flatten().collect()
}

/// RMS norm, alone and with its addition.
pub fn norm_cases() -> Vec<Case> {
    let sizes = [(1, 1), (1, 31), (3, 32), (2, 33), (5, 576), (40, 129), (1, 8192)];
    sizes
        .iter()
        .flat_map(|(n, cols)| VALUES.map(|v| norm(*n, *cols, v)))
        .collect()
}

/// Rotations of both styles with every scaling.
pub fn rope_cases() -> Vec<Case> {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 1.2,
    };
    let mut all = Vec::new();
    for style in [RopeStyle::Half, RopeStyle::Interleaved] {
        for (head_dim, dims) in [(2, 2), (64, 64), (80, 64), (96, 96), (256, 256), (128, 6)] {
            all.push(rope(style, head_dim, dims));
        }
        for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 8.0 }, yarn] {
            all.push(rope_scaled(style, 64, 64, scaling, true));
            all.push(rope_scaled(style, 128, 96, scaling, false));
        }
    }
    all
}

/// Products, grouped and gated, of every weight type.
pub fn linear_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in DType::WEIGHTS {
        let k = dtype.block().0.max(32);
        for (n, k, m) in [(1, k, 5), (1, 2 * k, 17), (2, k, 15), (5, 3 * k, 33), (19, k, 64)] {
            all.push(linear(dtype, n, k, m, Values::Normal));
        }
        all.push(linear(dtype, 3, 2 * k, 48, Values::Mixed));
    }
    all
}

/// Products of enough rows for tiles: whole ones and parts, odd numbers of row groups, several chunks of K.
pub fn tile_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in DType::WEIGHTS {
        let k = dtype.block().0.max(32);
        for (n, k, m) in [(16, k, 17), (33, 3 * k, 48), (70, 2048, 33)] {
            all.push(from(Form::Tiles, linear(dtype, n, k, m, Values::Normal)));
        }
    }
    // Experts of 40 rows, of 16 or so, and of fewer, which have short records.
    all.extend(experts_from(Form::Tiles, 40, 2, 2));
    for (n, count, used) in [(32, 4, 2), (64, 16, 2)] {
        all.extend(experts_from(Form::Short, n, count, used));
    }
    all.extend(attention_shapes().iter().map(wide_attention));
    // Scores of about 80: with keys of 8 bits they would be off by so much that other tokens win.
    all.push(wide_attention(&Attention {
        keys: 64.0,
        ..Attention::default()
    }));
    all
}

/// Products of several rows, for short records: fewer than one tile of rows, one, parts of one, several blocks of rows,
/// odd numbers of row groups and of blocks of K. `most` is the largest number of rows.
pub fn short_cases(most: usize) -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in DType::WEIGHTS {
        let k = dtype.block().0.max(32);
        for (n, k, m) in [
            (3, k, 17),
            (4, 3 * k, 48),
            (6, 2048, 33),
            (9, 5 * k, 20),
            (19, 2 * k, 16),
            (130, 2048, 33),
        ] {
            if n <= most {
                all.push(from(Form::Short, linear(dtype, n, k, m, Values::Normal)));
            }
        }
    }
    // Experts of 3 rows or so, some of them fewer, which have whole records.
    all.extend(experts_from(Form::Short, 12, 8, 2));
    if most >= 40 {
        all.extend(experts_from(Form::Short, 40, 2, 2));
    }
    all
}

/// Mixtures of `count` experts for `n` rows, from a form.
fn experts_from(form: Form, n: usize, count: usize, used: usize) -> impl Iterator<Item = Case> {
    let types = [
        DType::F32,
        DType::F16,
        DType::Quant(QuantType::Q4K),
        DType::Quant(QuantType::Q8_0),
    ];
    types.into_iter().map(move |dtype| {
        let shape = Experts {
            dtype,
            n,
            hidden: 256,
            inner: 256,
            experts: count,
            experts_used: used,
            weights: ExpertWeights::SoftmaxUsed,
        };
        from(form, experts(&shape))
    })
}

/// Mixtures of experts of every weight type: few rows and many, all experts used and one, sizes that share groups of
/// columns between neighbours.
pub fn expert_cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in DType::WEIGHTS {
        let k = dtype.block().0.max(32);
        for (n, hidden, inner, count, used) in [(1, k, k, 4, 2), (5, k, 2 * k, 8, 3), (40, 2 * k, k, 3, 1)] {
            all.push(Experts {
                dtype,
                n,
                hidden,
                inner,
                experts: count,
                experts_used: used,
                weights: ExpertWeights::SoftmaxUsed,
            });
        }
    }
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (n, hidden, inner) in [(1, 36, 20), (7, 36, 20), (23, 17, 1), (3, 40, 41)] {
            all.push(Experts {
                dtype,
                n,
                hidden,
                inner,
                experts: 5,
                experts_used: 2,
                weights: ExpertWeights::SoftmaxAll,
            });
        }
    }
    for (experts, experts_used) in [(1, 1), (2, 2), (64, 8), (128, 128)] {
        all.push(Experts {
            n: 3,
            experts,
            experts_used,
            hidden: 128,
            inner: 32,
            dtype: DType::F16,
            ..Experts::default()
        });
    }
    all.iter().map(experts).collect()
}

/// Attention over the paged cache: head sizes, groups, windows, caps, cache types, chunk boundaries.
pub fn attention_cases() -> Vec<Case> {
    attention_shapes().iter().map(attention).collect()
}

fn attention_shapes() -> Vec<Attention> {
    let base = Attention::default();
    let mut all = Vec::new();
    for head_dim in [8, 20, 40, 64, 72, 80, 96, 128, 256] {
        all.push(Attention {
            head_dim,
            kind: KvType::F16,
            ..base
        });
        all.push(Attention {
            head_dim,
            kind: KvType::F32,
            window: Some(37),
            ..base
        });
        if head_dim % 32 == 0 {
            all.push(Attention {
                head_dim,
                kind: KvType::Q8_0,
                ..base
            });
        }
    }
    for (num_heads, num_kv_heads) in [(1, 1), (2, 2), (4, 1), (5, 1), (12, 2), (32, 1), (40, 2)] {
        all.push(Attention {
            num_heads,
            num_kv_heads,
            head_dim: 32,
            ..base
        });
    }
    for (window, softcap) in [
        (Some(1), None),
        (Some(16), Some(20.0)),
        (Some(300), None),
        (None, Some(5.0)),
    ] {
        all.push(Attention {
            window,
            softcap,
            head_dim: 32,
            ..base
        });
    }
    for block_tokens in [32, 48, 256, 512] {
        all.push(Attention {
            block_tokens,
            head_dim: 32,
            ..base
        });
    }
    all.push(Attention {
        steps: &[[255, 257], [1, 1], [1, 1], [1, 1]],
        head_dim: 32,
        ..base
    });
    all.push(Attention {
        steps: &[[700, 0], [1, 0], [0, 5]],
        head_dim: 32,
        ..base
    });
    all.push(Attention { rope: true, ..base });
    all.push(Attention {
        rope: true,
        kind: KvType::F32,
        ..base
    });
    all
}

/// Every case.
pub fn all() -> Vec<Case> {
    let parts = [
        elementwise_cases(),
        norm_cases(),
        rope_cases(),
        linear_cases(),
        expert_cases(),
        attention_cases(),
    ];
    parts.into_iter().flatten().collect()
}
