//! Rotary embedding: the angles of a step, and the turning of heads.
//!
//! Angles are computed in f64 from the position alone, once per step and distinct rotation; a row's result therefore
//! does not depend on the batch it is in.

use dynair::{RopeScaling, RopeSpec, RopeStyle};

use crate::cpu::kernels::ops::OpTable;

/// The frequencies of one rotation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frequencies {
    /// Radians a pair turns per position.
    per_position: Vec<f64>,
    /// Multiplies cosine and sine.
    magnitude: f64,
}

impl Frequencies {
    /// As [`dynair::RopeSpec`] says. `factors` divide the frequencies.
    pub(crate) fn new(spec: &RopeSpec, factors: Option<&[f32]>) -> Frequencies {
        let (dims, theta) = (spec.dims as f64, f64::from(spec.theta));
        let own = |i: usize| theta.powf(-2.0 * i as f64 / dims) / factors.map_or(1.0, |f| f64::from(f[i]));
        let pairs = 0..spec.dims / 2;
        match spec.scaling {
            RopeScaling::None => Frequencies {
                per_position: pairs.map(own).collect(),
                magnitude: 1.0,
            },
            RopeScaling::Linear { factor } => {
                let per_position = pairs.map(|i| own(i) / f64::from(factor)).collect();
                Frequencies {
                    per_position,
                    magnitude: 1.0,
                }
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
            } => {
                // The pair that turns `rotations` times over the original context.
                let pair_of = |rotations: f32| {
                    let turns =
                        f64::from(original_context) / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
                    dims * turns.ln() / (2.0 * theta.ln())
                };
                let low = pair_of(beta_fast).floor().max(0.0);
                let high = pair_of(beta_slow).ceil().min(dims - 1.0);
                let blend = |i: usize| {
                    let stretch = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    own(i) / f64::from(factor) * stretch + own(i) * (1.0 - stretch)
                };
                Frequencies {
                    per_position: pairs.map(blend).collect(),
                    magnitude: f64::from(attention_factor),
                }
            }
        }
    }

    /// Pairs it turns.
    pub(crate) fn pairs(&self) -> usize {
        self.per_position.len()
    }

    /// Cosines, then sines, of one position.
    pub(crate) fn angles(&self, position: u32, out: &mut [f32]) {
        let (cos, sin) = out.split_at_mut(self.pairs());
        for ((frequency, cos), sin) in self.per_position.iter().zip(cos).zip(sin) {
            let (s, c) = (f64::from(position) * frequency).sin_cos();
            *cos = (c * self.magnitude) as f32;
            *sin = (s * self.magnitude) as f32;
        }
    }
}

/// Turns all heads of one row. `angles` holds its cosines, then its sines.
pub(crate) fn rope(
    table: &OpTable,
    style: RopeStyle,
    angles: &[f32],
    head_dim: usize,
    x: &[f32],
    y: &mut [f32],
) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    for (x, y) in x.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)) {
        table.rope(style, x, cos, sin, y);
    }
}
