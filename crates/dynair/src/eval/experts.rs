//! Mixture of experts: routing, and the products with each row's own experts.

use super::{Args, Array, activate, dot};
use crate::error::Result;
use crate::op::{Activation, ExpertWeights, RouterSpec};

/// Ids and weights of the experts each row of the logits chooses.
pub(super) fn route(args: &Args<'_>, spec: &RouterSpec) -> Result<Vec<Array>> {
    let logits = args.array(0)?;
    let (experts, used) = (spec.experts, spec.experts_used);
    if logits.cols() != experts || used == 0 || used > experts {
        return Err(args.bad(
            "logits",
            format_args!("{:?}", logits.dims),
            format_args!("[n, {experts}] with 1 to {experts} used"),
        ));
    }
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.rows() {
        // NaN counts as the least; a stable sort leaves equal logits in the order of their numbers.
        let rank = |e: &usize| {
            if row[*e].is_nan() {
                f32::NEG_INFINITY
            } else {
                row[*e]
            }
        };
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| rank(b).partial_cmp(&rank(a)).expect("a rank is no NaN"));
        let most = f64::from(row[order[0]]);
        let part = |e: &usize| (f64::from(row[*e]) - most).exp();
        let sum: f64 = match spec.weights {
            ExpertWeights::SoftmaxUsed => order[..used].iter().map(part).sum(),
            ExpertWeights::SoftmaxAll => order.iter().map(part).sum(),
        };
        ids.extend(order[..used].iter().map(|e| *e as f32));
        weights.extend(order[..used].iter().map(|e| (part(e) / sum) as f32));
    }
    let dims = [logits.data.len() / experts, used];
    Ok(vec![Array::new(&dims, ids), Array::new(&dims, weights)])
}

/// Stacked matrices: a weight of one expert has two dimensions only.
struct Stacked<'a> {
    data: &'a [f32],
    experts: usize,
    rows: usize,
    cols: usize,
}

impl<'a> Stacked<'a> {
    fn of(args: &Args<'a>, input: usize, cols: usize) -> Result<Stacked<'a>> {
        let w = args.array(input)?;
        let (experts, rows) = match w.dims[..] {
            [e, m, c] if c == cols => (e, m),
            [m, c] if c == cols => (1, m),
            _ => {
                let expected = format!("[E, M, {cols}]");
                return Err(args.bad("weight", format_args!("{:?}", w.dims), expected));
            }
        };
        Ok(Stacked {
            data: &w.data,
            experts,
            rows,
            cols,
        })
    }

    /// x times the matrix of an expert transposed, not yet rounded.
    fn product(
        &self,
        args: &Args<'_>,
        id: f32,
        x: &'a [f32],
    ) -> Result<impl Iterator<Item = f64> + use<'_, 'a>> {
        let expert = id as usize;
        if expert >= self.experts || expert as f32 != id {
            return Err(args.bad("expert", id, format_args!("below {}", self.experts)));
        }
        let size = self.rows * self.cols;
        let matrix = &self.data[expert * size..(expert + 1) * size];
        Ok(matrix.chunks_exact(self.cols.max(1)).map(move |row| dot(row, x)))
    }
}

/// The ids of `n` rows, and how many each has.
fn ids<'a>(args: &Args<'a>, n: usize) -> Result<(&'a Array, usize)> {
    let ids = args.array(1)?;
    match ids.dims[..] {
        [rows, used] if rows == n && used > 0 => Ok((ids, used)),
        _ => Err(args.bad("ids", format_args!("{:?}", ids.dims), format_args!("[{n}, U]"))),
    }
}

pub(super) fn glu(args: &Args<'_>, act: Activation) -> Result<Array> {
    let x = args.array(0)?;
    let (gate, up) = (Stacked::of(args, 2, x.cols())?, Stacked::of(args, 3, x.cols())?);
    if (gate.experts, gate.rows) != (up.experts, up.rows) {
        return Err(args.bad("rows of up", up.rows, gate.rows));
    }
    let n = x.data.len() / x.cols().max(1);
    let (ids, used) = ids(args, n)?;
    let mut data = Vec::with_capacity(n * used * gate.rows);
    for (x, ids) in x.rows().zip(ids.rows()) {
        for id in ids {
            let pairs = gate.product(args, *id, x)?.zip(up.product(args, *id, x)?);
            data.extend(pairs.map(|(g, u)| (activate(act, g) * u) as f32));
        }
    }
    Ok(Array::new(&[n, used, gate.rows], data))
}

pub(super) fn down(args: &Args<'_>) -> Result<Array> {
    let (h, weights) = (args.array(0)?, args.array(2)?);
    let [n, used, inner] = h.dims[..] else {
        return Err(args.bad("input 0", format_args!("{:?}", h.dims), "[n, U, F]"));
    };
    let (ids, have) = ids(args, n)?;
    if have != used || weights.dims != ids.dims {
        return Err(args.bad(
            "weights and ids",
            format_args!("{:?} and {:?}", weights.dims, ids.dims),
            format_args!("[{n}, {used}]"),
        ));
    }
    let down = Stacked::of(args, 3, inner)?;
    let mut data = Vec::with_capacity(n * down.rows);
    for ((h, ids), weights) in h
        .data
        .chunks_exact((used * inner).max(1))
        .zip(ids.rows())
        .zip(weights.rows())
    {
        let mut sums = vec![0.0f64; down.rows];
        for ((h, id), weight) in h.chunks_exact(inner.max(1)).zip(ids).zip(weights) {
            let product = down.product(args, *id, h)?;
            sums.iter_mut()
                .zip(product)
                .for_each(|(s, p)| *s += f64::from(*weight) * p);
        }
        data.extend(sums.into_iter().map(|s| s as f32));
    }
    Ok(Array::new(&[n, down.rows], data))
}
