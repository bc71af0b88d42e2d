//! What decoding reads of weights and cache, beside what plain reading gets of the machine in the same moments.
//!
//! Bytes are the plan's floors ([`dynair::plan::Cost`]), as in the roofline. The streaming read is a mean and not the best
//! of many, and is taken just before and just after a reply: what slows the machine down for a while slows both.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dynacore::cpu::isa::Isa;
use dynacore::cpu::peak::Stream;
use dynacore::cpu::{forget_peak_resident, peak_resident_bytes};
use dynair::Plan;
use dynair::plan::StepSize;
use serde::{Deserialize, Serialize};

/// How long a streaming read takes.
const READ: Duration = Duration::from_millis(100);

/// What the reading of a decoding reached.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Read {
    /// Bytes of weights and cache that a token takes at least, the mean over the timed tokens.
    pub(super) read_bytes_per_token: f64,
    /// That, times tokens a second.
    pub(super) read_bytes_per_s: f64,
    /// A streaming read by as many threads: mean of one before and one after.
    pub(super) stream_bytes_per_s: f64,
    /// The one over the other. Above 1 where weights come from a cache, or the stream was slower than they.
    pub(super) read_share: f64,
}

impl Read {
    pub(super) fn new(bytes_per_token: f64, tokens_per_s: f64, streams: [f64; 2]) -> Read {
        let (bytes, stream) = (bytes_per_token * tokens_per_s, (streams[0] + streams[1]) / 2.0);
        Read {
            read_bytes_per_token: bytes_per_token,
            read_bytes_per_s: bytes,
            stream_bytes_per_s: stream,
            read_share: bytes / stream,
        }
    }
}

/// The plan of a model in this process, and the threads that read for it.
pub(super) struct Reading {
    plan: Plan,
    kv_block: (usize, usize),
    isa: Isa,
    threads: usize,
    /// Peak resident memory, bytes, before the last streaming read took some for itself.
    peak_resident: AtomicU64,
}

impl Reading {
    /// Of `plan` with cache blocks of `kv_block` (numbers, bytes), read by `threads` threads.
    pub(super) fn new(plan: Plan, kv_block: (usize, usize), isa: Isa, threads: usize) -> Reading {
        Reading {
            plan,
            kv_block,
            isa,
            threads,
            peak_resident: AtomicU64::new(0),
        }
    }

    /// Mean bytes of weights and cache of a step of one row, over steps that attend to `contexts` tokens each, their own
    /// included. 0 without a step.
    pub(super) fn bytes_per_token(&self, contexts: Range<usize>) -> f64 {
        let (block, count) = (self.kv_block, contexts.len().max(1));
        let step = |context_len| {
            let size = StepSize {
                kv_block: block,
                ..StepSize::decode(context_len)
            };
            let costs = self.plan.steps.iter().map(|s| s.cost(&self.plan, &size));
            costs.map(|c| c.weight_bytes + c.cache_bytes).sum::<u64>()
        };
        contexts.map(step).map(|bytes| bytes as f64).sum::<f64>() / count as f64
    }

    /// Bytes a second of a short streaming read; `None` where too little memory is free for one.
    pub(super) fn stream(&self) -> Option<f64> {
        let peak = self.peak_resident().unwrap_or(0);
        let rate = Stream::new(self.isa, self.threads).ok()?.rate(READ);
        // Its memory is not the engine's. Where it cannot be forgotten, it counts.
        if forget_peak_resident() {
            self.peak_resident.store(peak, Ordering::Relaxed);
        }
        Some(rate)
    }

    /// Peak resident memory of this process, bytes, streaming reads left out.
    pub(super) fn peak_resident(&self) -> Option<u64> {
        Some(peak_resident_bytes(None)?.max(self.peak_resident.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_mean_of_both_streams() {
        let read = Read::new(2e9, 6.0, [10e9, 20e9]);
        let expected = Read {
            read_bytes_per_token: 2e9,
            read_bytes_per_s: 12e9,
            stream_bytes_per_s: 15e9,
            read_share: 0.8,
        };
        assert_eq!(read, expected);
    }
}
