//! The rows of logits of a step as a job of the workers: one item each, given away where it lies.

use std::sync::Arc;

use super::Inner;
use crate::cpu::pool::Job;
use crate::device::TakeRow;

/// See the module's docs.
pub(super) struct OutputRows {
    inner: Arc<Inner>,
    count: usize,
    take: Arc<TakeRow>,
}

impl OutputRows {
    /// The first `count` rows of the logits.
    pub(super) fn new(inner: &Arc<Inner>, count: usize, take: &Arc<TakeRow>) -> OutputRows {
        OutputRows {
            inner: Arc::clone(inner),
            count,
            take: Arc::clone(take),
        }
    }
}

impl Job for OutputRows {
    fn stages(&self) -> usize {
        1
    }

    fn items(&self, _: usize) -> usize {
        self.count
    }

    fn run(&self, _: usize, row: usize, _: usize) {
        let logits = self.inner.program.logits.row_range(row..row + 1);
        (self.take)(row, self.inner.arena.write(logits));
    }

    fn done(&self, _: usize) {
        self.inner.arena.new_phase();
    }
}
