//! The shapes checkpoints are made in: the published dimensions of real models, and a tiny one per family.

/// Scaling of rotary frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rope {
    /// None.
    Plain,
    /// All frequencies divided by the factor.
    Linear(f32),
    /// Llama 3: low frequencies divided by `factor`, high ones kept, those between interpolated; relative to the
    /// context the model was first trained with. Stored as the tensor `rope_freqs.weight`.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Tokens of the original context.
        original_context: f64,
    },
}

/// Dimensions of a decoder; all that distinguishes two models of one family.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelShape {
    /// Name for `make-model`.
    pub name: &'static str,
    /// `general.architecture`.
    pub arch: &'static str,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward network.
    pub ffn_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions the model is made for.
    pub context_tokens: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Their scaling.
    pub rope: Rope,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// Sliding window of the local layers, for families that have them.
    pub window_tokens: Option<usize>,
    /// Experts of each layer, for families that have them.
    pub experts: Option<Experts>,
    /// Scales, for families that have them.
    pub scales: Option<Scales>,
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many a row uses.
    pub used: usize,
    /// Width of the feed-forward network of each.
    pub ffn_size: usize,
}

/// Granite's scales.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scales {
    /// Multiplies the embeddings.
    pub embedding: f32,
    /// Multiplies each branch before it is added.
    pub residual: f32,
    /// Multiplies the scores.
    pub attention: f32,
    /// What logits are divided by.
    pub logit: f32,
}

const LLAMA: ModelShape = ModelShape {
    name: "",
    arch: "llama",
    layers: 0,
    hidden_size: 0,
    ffn_size: 0,
    num_heads: 0,
    num_kv_heads: 0,
    head_dim: 64,
    context_tokens: 131_072,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    rope: Rope::Plain,
    vocab_size: 128_256,
    tied: true,
    window_tokens: None,
    experts: None,
    scales: None,
};
const LLAMA3_2: Rope = Rope::Llama3 {
    factor: 32.0,
    original_context: 8192.0,
};
const LLAMA3_1: Rope = Rope::Llama3 {
    factor: 8.0,
    original_context: 8192.0,
};
const QWEN2: ModelShape = ModelShape {
    arch: "qwen2",
    context_tokens: 32_768,
    norm_eps: 1e-6,
    rope_theta: 1e6,
    vocab_size: 151_936,
    ..LLAMA
};
const QWEN3: ModelShape = ModelShape {
    arch: "qwen3",
    context_tokens: 40_960,
    head_dim: 128,
    ..QWEN2
};
const GEMMA2: ModelShape = ModelShape {
    arch: "gemma2",
    context_tokens: 8192,
    head_dim: 256,
    norm_eps: 1e-6,
    rope_theta: 1e4,
    vocab_size: 256_000,
    window_tokens: Some(4096),
    ..LLAMA
};
const GEMMA3: ModelShape = ModelShape {
    arch: "gemma3",
    context_tokens: 32_768,
    rope_theta: 1e6,
    vocab_size: 262_144,
    window_tokens: Some(512),
    ..GEMMA2
};
const GRANITE: ModelShape = ModelShape {
    arch: "granite",
    rope_theta: 1e7,
    vocab_size: 49_155,
    scales: Some(Scales {
        embedding: 12.0,
        residual: 0.22,
        attention: 0.015_625,
        logit: 8.0,
    }),
    ..LLAMA
};
/// Scales that differ from each other and from those a model without them has.
const TINY_SCALES: Option<Scales> = Some(Scales {
    embedding: 6.0,
    residual: 0.4,
    attention: 0.1,
    logit: 4.0,
});
/// Dimensions all tiny shapes start from: sizes that differ from each other, so that a swapped pair shows, and rows of
/// whole blocks of every type.
const TINY: ModelShape = ModelShape {
    layers: 2,
    hidden_size: 256,
    ffn_size: 512,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 32,
    context_tokens: 512,
    vocab_size: crate::vocab::Vocab::SMALL,
    ..LLAMA
};

const fn dims(
    shape: ModelShape,
    name: &'static str,
    [layers, hidden_size, ffn_size, num_heads, num_kv_heads, head_dim]: [usize; 6],
) -> ModelShape {
    ModelShape {
        name,
        layers,
        hidden_size,
        ffn_size,
        num_heads,
        num_kv_heads,
        head_dim,
        ..shape
    }
}

/// Every shape, tiny ones last. Sources: the models' published `config.json`.
pub const SHAPES: &[ModelShape] = &[
    dims(QWEN2, "qwen2.5-0.5b", [24, 896, 4864, 14, 2, 64]),
    dims(QWEN2, "qwen2.5-1.5b", [28, 1536, 8960, 12, 2, 128]),
    dims(
        ModelShape {
            vocab_size: 152_064,
            tied: false,
            ..QWEN2
        },
        "qwen2.5-7b",
        [28, 3584, 18_944, 28, 4, 128],
    ),
    dims(QWEN3, "qwen3-0.6b", [28, 1024, 3072, 16, 8, 128]),
    dims(QWEN3, "qwen3-1.7b", [28, 2048, 6144, 16, 8, 128]),
    dims(QWEN3, "qwen3-4b", [36, 2560, 9728, 32, 8, 128]),
    dims(
        ModelShape { tied: false, ..QWEN3 },
        "qwen3-8b",
        [36, 4096, 12_288, 32, 8, 128],
    ),
    dims(
        ModelShape {
            rope: LLAMA3_2,
            ..LLAMA
        },
        "llama3.2-1b",
        [16, 2048, 8192, 32, 8, 64],
    ),
    dims(
        ModelShape {
            rope: LLAMA3_2,
            ..LLAMA
        },
        "llama3.2-3b",
        [28, 3072, 8192, 24, 8, 128],
    ),
    dims(
        ModelShape {
            rope: LLAMA3_1,
            tied: false,
            ..LLAMA
        },
        "llama3.1-8b",
        [32, 4096, 14_336, 32, 8, 128],
    ),
    dims(
        ModelShape {
            rope_theta: 1e5,
            context_tokens: 8192,
            vocab_size: 49_152,
            ..LLAMA
        },
        "smollm2-135m",
        [30, 576, 1536, 9, 3, 64],
    ),
    dims(
        ModelShape {
            arch: "qwen3moe",
            tied: false,
            experts: Some(Experts {
                count: 128,
                used: 8,
                ffn_size: 768,
            }),
            ..QWEN3
        },
        "qwen3-30b-a3b",
        [48, 2048, 6144, 32, 4, 128],
    ),
    dims(
        ModelShape {
            rope_theta: 5e6,
            ..GRANITE
        },
        "granite3.1-2b",
        [40, 2048, 8192, 32, 8, 64],
    ),
    dims(
        ModelShape {
            arch: "granitemoe",
            rope_theta: 1.5e6,
            experts: Some(Experts {
                count: 32,
                used: 8,
                ffn_size: 512,
            }),
            scales: Some(Scales {
                embedding: 12.0,
                residual: 0.22,
                attention: 0.015_625,
                logit: 6.0,
            }),
            ..GRANITE
        },
        "granite3.1-1b-a400m",
        [24, 1024, 512, 16, 8, 64],
    ),
    dims(GEMMA2, "gemma2-2b", [26, 2304, 9216, 8, 4, 256]),
    dims(GEMMA3, "gemma3-270m", [18, 640, 2048, 4, 1, 256]),
    dims(GEMMA3, "gemma3-1b", [26, 1152, 6912, 4, 1, 256]),
    dims(
        ModelShape {
            rope: Rope::Linear(8.0),
            context_tokens: 131_072,
            vocab_size: 262_208,
            window_tokens: Some(1024),
            ..GEMMA3
        },
        "gemma3-4b",
        [34, 2560, 10_240, 8, 4, 256],
    ),
    ModelShape {
        name: "tiny-llama",
        tied: false,
        rope: Rope::Llama3 {
            factor: 8.0,
            original_context: 64.0,
        },
        ..TINY
    },
    ModelShape {
        name: "tiny-qwen2",
        arch: "qwen2",
        head_dim: 64,
        norm_eps: 1e-6,
        rope_theta: 1e6,
        ..TINY
    },
    ModelShape {
        name: "tiny-qwen3",
        arch: "qwen3",
        norm_eps: 1e-6,
        rope_theta: 1e6,
        ..TINY
    },
    // Rows of the down projections are no whole blocks of the K types, those of the others are.
    ModelShape {
        name: "tiny-granitemoe",
        arch: "granitemoe",
        ffn_size: 64,
        experts: Some(Experts {
            count: 6,
            used: 2,
            ffn_size: 64,
        }),
        scales: TINY_SCALES,
        ..TINY
    },
    // And the other way round.
    ModelShape {
        name: "tiny-qwen3moe",
        arch: "qwen3moe",
        hidden_size: 128,
        norm_eps: 1e-6,
        rope_theta: 1e6,
        experts: Some(Experts {
            count: 8,
            used: 3,
            ffn_size: 256,
        }),
        ..TINY
    },
    ModelShape {
        name: "tiny-granite",
        arch: "granite",
        scales: TINY_SCALES,
        ..TINY
    },
    // Local and global layers alternate; the window is short enough for a test to pass beyond it.
    ModelShape {
        name: "tiny-gemma2",
        arch: "gemma2",
        layers: 4,
        hidden_size: 128,
        ffn_size: 256,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        window_tokens: Some(16),
        ..TINY
    },
    // Six layers, because the sixth is the first global one.
    ModelShape {
        name: "tiny-gemma3",
        arch: "gemma3",
        layers: 6,
        hidden_size: 128,
        ffn_size: 256,
        num_kv_heads: 1,
        norm_eps: 1e-6,
        rope_theta: 1e6,
        window_tokens: Some(16),
        ..TINY
    },
];

impl ModelShape {
    /// The shape of that name.
    pub fn named(name: &str) -> Option<ModelShape> {
        SHAPES.iter().find(|s| s.name == name).copied()
    }

    /// Whether this is one of the Gemma families: norms after each branch, scaled embeddings.
    pub fn is_gemma(&self) -> bool {
        matches!(self.arch, "gemma2" | "gemma3")
    }
}
