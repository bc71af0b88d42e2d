//! Lowering of a mixture of experts.
//!
//! Rows are grouped by expert once per router: the phases between grouping and the next one that groups share it.

use std::sync::Arc;

use dynair::{Activation, DType, RouterSpec, Step};

use super::{CpuWeight, ExpertPhase, Lowering, Phase, Val, invalid, meets, typed_value};
use crate::cpu::ops::experts::Uses;
use crate::cpu::ops::linear::Meets;
use crate::error::Result;

impl Lowering<'_> {
    pub(super) fn route(&mut self, step: &Step, spec: RouterSpec) -> Result<()> {
        let (logits, weights) = (self.val(step, 0)?, self.out(step, 1)?);
        let ids = match step.outputs.first() {
            Some(ids) => typed_value(self.plan, ids, DType::I32, &step.label)?,
            None => return Err(invalid(&step.label, "output 0 is missing")),
        };
        self.same(step, &[ids, weights])?;
        if logits.width != spec.experts || logits.rows != ids.rows || ids.width != spec.experts_used {
            let detail = format!("{spec:?} of {logits:?} to {ids:?}");
            return Err(invalid(&step.label, detail));
        }
        self.routed.retain(|(old, _)| old.at != ids.at);
        self.routed.push((ids, spec.experts));
        self.grouped = None;
        let phase = ExpertPhase::Route {
            logits,
            spec,
            ids,
            weights,
        };
        self.push(step, Phase::Experts(phase));
        Ok(())
    }

    /// A stacked weight of `cols` columns, with the number of matrices and the rows of each.
    fn stacked(&self, step: &Step, i: usize, cols: usize) -> Result<(Arc<CpuWeight>, usize, usize)> {
        let (weight, rows) = self.matrix(step, i, cols)?;
        let (_, id) = self.weight(step, i)?;
        let experts = self.plan.weights[id].experts;
        if experts == 0 || !rows.is_multiple_of(experts) {
            let detail = format!("weight of {rows} rows stacks {experts} matrices");
            return Err(invalid(&step.label, detail));
        }
        Ok((weight, experts, rows / experts))
    }

    /// The ids that input 1 holds, for weights of `experts` experts that rows meet so; rows are grouped by them from here on.
    fn uses(&mut self, step: &Step, experts: usize, meets: Meets) -> Result<Uses> {
        let ids = match step.inputs.get(1) {
            Some(ids) => typed_value(self.plan, ids, DType::I32, &step.label)?,
            None => return Err(invalid(&step.label, "input 1 is missing")),
        };
        if !self.routed.contains(&(ids, experts)) {
            let detail = format!("input 1 holds no ids that a router of {experts} experts has made");
            return Err(invalid(&step.label, detail));
        }
        if self.grouped != Some(ids) {
            self.push(step, Phase::Experts(ExpertPhase::Group { ids, experts }));
            self.grouped = Some(ids);
        }
        Ok(Uses {
            experts,
            used: ids.width,
            rows: ids.rows,
            meets,
        })
    }

    /// The rows of `x`, by expert.
    fn gather(&mut self, step: &Step, x: Val, uses: Uses, each: usize) {
        self.push(step, Phase::Experts(ExpertPhase::Gather { x, uses, each }));
    }

    pub(super) fn expert_glu(&mut self, step: &Step, act: Activation) -> Result<()> {
        let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
        let (gate, experts, inner) = self.stacked(step, 2, x.cols)?;
        let (up, up_experts, up_inner) = self.stacked(step, 3, x.cols)?;
        let uses = self.uses(step, experts, meets(self.whole, [&gate, &up]))?;
        let fits = (experts, inner) == (up_experts, up_inner)
            && x.width == x.cols
            && x.rows == uses.rows
            && out.rows == uses.rows
            && (out.width, out.cols) == (uses.used * inner, inner);
        if !fits {
            let detail =
                format!("gate of {experts} times {inner} rows, up of {up_experts} times {up_inner}, {out:?}");
            return Err(invalid(&step.label, detail));
        }
        self.gather(step, x, uses, uses.used);
        let phase = ExpertPhase::Glu {
            weights: [gate, up],
            act,
            uses,
            out,
        };
        self.push(step, Phase::Experts(phase));
        Ok(())
    }

    pub(super) fn expert_down(&mut self, step: &Step) -> Result<()> {
        let (h, weights, out) = (self.val(step, 0)?, self.val(step, 2)?, self.out(step, 0)?);
        let (down, experts, hidden) = self.stacked(step, 3, h.cols)?;
        let uses = self.uses(step, experts, meets(self.whole, [&down]))?;
        let fits = h.rows == uses.rows
            && h.width == uses.used * h.cols
            && (weights.rows, weights.width) == (uses.rows, uses.used)
            && (out.rows, out.width, out.cols) == (uses.rows, hidden, hidden);
        if !fits {
            let detail = format!("down of {experts} times {hidden} rows, {h:?}, {weights:?}, {out:?}");
            return Err(invalid(&step.label, detail));
        }
        self.gather(step, h, uses, 1);
        let phase = ExpertPhase::Down { down, uses, hidden };
        self.push(step, Phase::Experts(phase));
        self.push(step, Phase::Experts(ExpertPhase::Combine { uses, weights, out }));
        Ok(())
    }
}
