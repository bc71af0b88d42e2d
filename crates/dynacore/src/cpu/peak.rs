//! How fast this machine reads memory and multiplies, measured now: what a roofline is drawn from.
//!
//! Every figure of a [`Peak`] is the best of many short samples with all threads at once, so that it is the machine's and
//! not that of whatever else runs on it. A [`Stream`] alone says what reading gets just now, others included.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::isa::Isa;
use super::kernels::peak::{PeakLoops, ROUNDS, TILE_ROUNDS};
use super::topology::Topology;
use crate::error::{Error, Result};

/// Bytes one thread reads in a sample: long enough to hide the start.
const SAMPLE_BYTES: usize = 4 << 20;
/// Samples a thread's memory holds at least, where so much is free.
const SAMPLES: usize = 16;
/// How many times the last cache all memory holds, so that each sample comes from memory again.
const TIMES_CACHE: usize = 2;
/// How often each figure is sampled.
const REPEATS: usize = 48;
/// Most of the free memory that is read from.
const MEMORY_SHARE: u64 = 4;

/// What the machine can do at most with some threads, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// Threads.
    pub threads: usize,
    /// Bytes of a streaming read from memory.
    pub read_bytes: f64,
    /// Additions and multiplications in f32; a multiply-add is two.
    pub f32_flops: f64,
    /// Additions and multiplications of 16-bit integers, where the kernels use them.
    pub i16_ops: Option<f64>,
    /// Additions and multiplications of bytes, where kernels of short records use them. Where sums have 16 bits, they are
    /// these, without what it takes to widen them.
    pub i8_ops: Option<f64>,
    /// Additions and multiplications of tiles of bf16, where the kernels use them.
    pub bf16_ops: Option<f64>,
}

impl Peak {
    /// Measures with `threads` threads and the instructions of `isa`; takes about a second.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if this CPU lacks `isa`; [`Error::OutOfMemory`] if there is no memory to read.
    pub fn measure(isa: Isa, threads: usize) -> Result<Peak> {
        let stream = Stream::new(isa, threads)?;
        let (loops, threads) = (stream.loops, stream.memory.len());
        let read = best(threads, |worker, i| stream.sample(worker, i));
        drop(stream);
        let rate =
            |rounds: usize, count: usize, seconds: f64| (2 * threads * rounds * count) as f64 / seconds;
        let fma = best(threads, |_, _| loops.run_fma());
        let dot = loops.dot.map(|_| best(threads, |_, _| loops.run_dot()));
        let short = loops.short.map(|_| best(threads, |_, _| loops.run_short()));
        let tile = loops.tile.map(|_| best(threads, |_, _| loops.run_tile()));
        Ok(Peak {
            threads,
            read_bytes: (threads * SAMPLE_BYTES) as f64 / read,
            f32_flops: rate(ROUNDS, loops.fma_count, fma),
            i16_ops: dot.map(|seconds| rate(ROUNDS, loops.dot_count, seconds)),
            i8_ops: short.map(|seconds| rate(ROUNDS, loops.short_count, seconds)),
            bf16_ops: tile.map(|seconds| rate(TILE_ROUNDS, loops.tile_count, seconds)),
        })
    }
}

/// Memory that threads read from end to end and again, more of it than caches hold.
pub struct Stream {
    loops: PeakLoops,
    /// Of each thread: whole samples, at least one.
    memory: Vec<Vec<u8>>,
}

impl Stream {
    /// Memory for `threads` threads, at least one, that read it with the instructions of `isa`: 64 MiB each, or twice the
    /// last cache if that is more.
    ///
    /// # Errors
    /// As [`Peak::measure`].
    pub fn new(isa: Isa, threads: usize) -> Result<Stream> {
        let loops = PeakLoops::of(isa).ok_or_else(|| Error::Unsupported {
            device: "cpu".into(),
            what: format!("the instruction set `{isa}`"),
        })?;
        let threads = threads.max(1);
        let free = Topology::detect().free_bytes() / MEMORY_SHARE;
        let cache = last_cache_bytes().unwrap_or(0);
        let enough = TIMES_CACHE * cache.div_ceil(threads * SAMPLE_BYTES);
        let samples = (free / (threads * SAMPLE_BYTES) as u64).min(enough.max(SAMPLES) as u64) as usize;
        // From the cache it would say nothing of memory.
        if samples == 0 || samples * threads * SAMPLE_BYTES <= cache {
            return Err(Error::OutOfMemory {
                device: "cpu".into(),
                bytes: threads * SAMPLE_BYTES * enough.max(1),
                what: "measuring how fast memory is read".into(),
            });
        }
        // Ones, not zeros: memory that was never written need not exist.
        let memory = (0..threads).map(|_| vec![1; samples * SAMPLE_BYTES]).collect();
        Ok(Stream { loops, memory })
    }

    /// Thread `worker` reads its `i`-th sample, round and round.
    fn sample(&self, worker: usize, i: usize) {
        let memory = &self.memory[worker];
        let at = i % (memory.len() / SAMPLE_BYTES) * SAMPLE_BYTES;
        self.loops.run_read(&memory[at..at + SAMPLE_BYTES]);
    }

    /// Bytes a second that all threads read together in about `time`: the mean, so that what else runs on the machine
    /// takes its part, as it does of any work.
    pub fn rate(&self, time: Duration) -> f64 {
        let read = AtomicUsize::new(0);
        let seconds = together(self.memory.len(), |worker| {
            let start = Instant::now();
            for i in 0.. {
                self.sample(worker, i);
                read.fetch_add(SAMPLE_BYTES, Ordering::Relaxed);
                if start.elapsed() >= time {
                    break;
                }
            }
        });
        read.into_inner() as f64 / seconds.max(1e-9)
    }
}

/// Bytes of the largest cache of the first CPU, which others share with it; `None` where the system does not say.
fn last_cache_bytes() -> Option<usize> {
    let sizes = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let bytes = |entry: std::io::Result<std::fs::DirEntry>| {
        let size = std::fs::read_to_string(entry.ok()?.path().join("size")).ok()?;
        size.trim()
            .strip_suffix('K')?
            .parse::<usize>()
            .ok()?
            .checked_mul(1 << 10)
    };
    sizes.filter_map(bytes).max()
}

/// The shortest of many runs of `job(worker, run)` on all threads: seconds from a common start to the last end.
fn best(threads: usize, job: impl Fn(usize, usize) + Sync) -> f64 {
    (0..REPEATS)
        .map(|run| together(threads, |worker| job(worker, run)))
        .fold(f64::INFINITY, f64::min)
        // A clock that did not move must not become an infinite rate.
        .max(1e-9)
}

fn together(threads: usize, job: impl Fn(usize) + Sync) -> f64 {
    let ready = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                let (ready, job) = (&ready, &job);
                scope.spawn(move || {
                    ready.fetch_add(1, Ordering::SeqCst);
                    while ready.load(Ordering::SeqCst) < threads {
                        // More threads than cores must still come to their start.
                        std::thread::yield_now();
                    }
                    let start = Instant::now();
                    job(worker);
                    (start, Instant::now())
                })
            })
            .collect();
        let spans: Vec<(Instant, Instant)> = workers
            .into_iter()
            .map(|w| w.join().expect("the loops do not panic"))
            .collect();
        let start = spans.iter().map(|s| s.0).min().expect("at least one thread");
        let end = spans.iter().map(|s| s.1).max().expect("at least one thread");
        (end - start).as_secs_f64()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::table::KernelTable;

    #[test]
    fn every_set_of_this_cpu_gives_finite_rates() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let peak = Peak::measure(isa, 1).expect("the CPU has it");
            let rates = [
                peak.read_bytes,
                peak.f32_flops,
                peak.i16_ops.unwrap_or(1.0),
                peak.i8_ops.unwrap_or(1.0),
                peak.bf16_ops.unwrap_or(1.0),
            ];
            assert!(rates.iter().all(|r| r.is_finite() && *r > 0.0), "{isa}: {peak:?}");
            assert_eq!(peak.i16_ops.is_some(), isa != Isa::Portable);
            let table = KernelTable::of(isa).expect("the CPU has it");
            assert_eq!(peak.i8_ops.is_some(), table.short.is_some());
            assert_eq!(peak.bf16_ops.is_some(), isa == Isa::Amx);
        }
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            assert!(Peak::measure(isa, 1).is_err());
        }
    }

    #[test]
    fn a_stream_reads_all_its_samples_and_ends() {
        let stream = Stream::new(Isa::Portable, 2).expect("every CPU has it");
        assert_eq!(stream.memory.len(), 2);
        assert!(
            stream
                .memory
                .iter()
                .all(|m| !m.is_empty() && m.len() % SAMPLE_BYTES == 0)
        );
        // One past the last begins anew.
        stream.sample(1, stream.memory[1].len() / SAMPLE_BYTES);
        let rate = stream.rate(Duration::from_millis(1));
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            assert!(Stream::new(isa, 1).is_err());
        }
    }

    #[test]
    fn every_thread_runs_once_a_sample() {
        let runs = AtomicUsize::new(0);
        best(3, |_, _| {
            runs.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(runs.into_inner(), 3 * REPEATS);
    }
}
