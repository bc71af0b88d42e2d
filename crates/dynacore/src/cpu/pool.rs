//! Worker threads that walk a step together.
//!
//! A [`Pool`] spawns its threads once. [`Pool::run`] lets all of them, and the calling thread as worker 0, run one
//! [`Job`]; the job synchronises itself with [`Worker::barrier`]. Waiting is spin-then-park: a wait of a few
//! microseconds (the usual one) costs no system call, and a thread whose core was taken by somebody else does not keep
//! the others burning theirs. A panic in a worker ends the job for all: the others leave at their next barrier, and
//! `run` gives an error.
//!
//! Memory the workers share is in [`shared`].

pub(crate) mod shared;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Pauses before a waiting thread parks: some tens of microseconds, longer than the skew between workers at a
/// barrier, shorter than what parking and waking cost when repeated.
const SPINS: u32 = 2000;

/// The job ended early because a worker panicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Aborted;

/// What all workers run.
pub(crate) trait Job: Send + Sync {
    /// Runs the share of `worker`. Every worker must pass the same barriers.
    fn run(&self, worker: &Worker<'_>) -> Result<(), Aborted>;
}

/// A worker's view of the job it runs.
pub(crate) struct Worker<'a> {
    /// Its number; 0 is the thread that called [`Pool::run`].
    pub(crate) index: usize,
    /// Number of workers.
    pub(crate) count: usize,
    shared: &'a Shared,
}

impl Worker<'_> {
    /// Waits until all workers have come here; what any of them wrote before is visible to all after.
    pub(crate) fn barrier(&self) -> Result<(), Aborted> {
        if self.count == 1 {
            return Ok(());
        }
        self.shared.barrier()
    }

    /// The share of `items` this worker has when they are split evenly in order; worker 0 gets the larger shares.
    pub(crate) fn share(&self, items: usize) -> std::ops::Range<usize> {
        let (each, more) = (items / self.count, items % self.count);
        let start = self.index * each + self.index.min(more);
        start..start + each + usize::from(self.index < more)
    }
}

/// A counter threads can wait on.
#[derive(Default)]
struct Gate {
    value: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data, so a panic while it was held broke nothing.
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> u32 {
        self.value.load(SeqCst)
    }

    fn bump(&self) {
        self.value.fetch_add(1, SeqCst);
        // Either the sleeper sees the new value after it has announced itself, or we see it announced.
        if self.sleepers.load(SeqCst) > 0 {
            let _guard = self.lock();
            self.wake.notify_all();
        }
    }

    /// Waits until the value is no longer `seen`.
    fn wait(&self, seen: u32) {
        for _ in 0..SPINS {
            if self.get() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        self.sleepers.fetch_add(1, SeqCst);
        while self.get() == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

struct Shared {
    count: usize,
    job: Mutex<Option<Arc<dyn Job>>>,
    /// Bumped when a job starts (or the pool ends).
    start: Gate,
    stop: AtomicBool,
    /// Workers other than 0 still inside the job.
    running: AtomicUsize,
    /// Bumped when the last of them leaves.
    done: Gate,
    arrived: AtomicUsize,
    /// Bumped when all workers have arrived at a barrier, or the job is aborted.
    pass: Gate,
    aborted: AtomicBool,
    panic: Mutex<Option<String>>,
}

impl Shared {
    fn barrier(&self) -> Result<(), Aborted> {
        let seen = self.pass.get();
        if self.aborted.load(SeqCst) {
            return Err(Aborted);
        }
        if self.arrived.fetch_add(1, SeqCst) + 1 == self.count {
            self.arrived.store(0, SeqCst);
            self.pass.bump();
        } else {
            self.pass.wait(seen);
        }
        if self.aborted.load(SeqCst) {
            Err(Aborted)
        } else {
            Ok(())
        }
    }

    fn run_share(&self, job: &dyn Job, index: usize) {
        let worker = Worker {
            index,
            count: self.count,
            shared: self,
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job.run(&worker))) {
            let message = payload
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".to_owned());
            self.panic
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(message);
            self.aborted.store(true, SeqCst);
            self.pass.bump();
        }
    }

    fn worker_loop(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.start.wait(seen);
            seen = seen.wrapping_add(1);
            if self.stop.load(SeqCst) {
                return;
            }
            let job = self.job.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(job) = job {
                self.run_share(&*job, index);
            }
            if self.running.fetch_sub(1, SeqCst) == 1 {
                self.done.bump();
            }
        }
    }
}

/// The worker threads of a device.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `count` workers: `count − 1` threads and whoever calls [`Pool::run`].
    ///
    /// # Errors
    /// If the operating system refuses a thread.
    pub(crate) fn new(count: usize) -> std::io::Result<Pool> {
        assert!(count >= 1, "a pool has at least one worker");
        let shared = Arc::new(Shared {
            count,
            job: Mutex::default(),
            start: Gate::default(),
            stop: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            done: Gate::default(),
            arrived: AtomicUsize::new(0),
            pass: Gate::default(),
            aborted: AtomicBool::new(false),
            panic: Mutex::default(),
        });
        let mut pool = Pool {
            shared,
            threads: Vec::new(),
        };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("cpu-worker-{index}"))
                .spawn(move || shared.worker_loop(index))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Number of workers.
    pub(crate) fn count(&self) -> usize {
        self.shared.count
    }

    /// Runs `job` on all workers and returns when all have left it.
    ///
    /// # Errors
    /// The message of the first panic of a worker. The pool itself stays usable.
    pub(crate) fn run(&mut self, job: &Arc<dyn Job>) -> Result<(), String> {
        let shared = &*self.shared;
        if shared.count > 1 {
            *shared.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(job));
            shared.running.store(shared.count - 1, SeqCst);
            let done = shared.done.get();
            shared.start.bump();
            shared.run_share(&**job, 0);
            shared.done.wait(done);
            *shared.job.lock().unwrap_or_else(PoisonError::into_inner) = None;
        } else {
            shared.run_share(&**job, 0);
        }
        shared.arrived.store(0, SeqCst);
        if shared.aborted.swap(false, SeqCst) {
            let message = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
            return Err(message.unwrap_or_else(|| "no message".to_owned()));
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.start.bump();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of its jobs, so joining cannot fail in a way worth a second panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rounds {
        counters: Vec<AtomicUsize>,
        rounds: usize,
        panic_at: Option<(usize, usize)>,
    }

    impl Job for Rounds {
        fn run(&self, worker: &Worker<'_>) -> Result<(), Aborted> {
            for round in 0..self.rounds {
                assert!(self.panic_at != Some((worker.index, round)), "told to panic");
                self.counters[worker.index].fetch_add(1, SeqCst);
                worker.barrier()?;
                for c in &self.counters {
                    assert!(
                        c.load(SeqCst) > round,
                        "a worker passed the barrier before all had come"
                    );
                }
                worker.barrier()?;
            }
            Ok(())
        }
    }

    fn rounds(count: usize, rounds: usize, panic_at: Option<(usize, usize)>) -> Arc<Rounds> {
        let counters = (0..count).map(|_| AtomicUsize::new(0)).collect();
        Arc::new(Rounds {
            counters,
            rounds,
            panic_at,
        })
    }

    #[test]
    fn barriers_hold_with_more_threads_than_cores() {
        for count in [1, 2, 3, 9] {
            let mut pool = Pool::new(count).expect("threads can be had");
            for _ in 0..3 {
                let job = rounds(count, 200, None);
                pool.run(&(job.clone() as Arc<dyn Job>)).expect("no panic");
                assert!(job.counters.iter().all(|c| c.load(SeqCst) == 200));
            }
        }
    }

    #[test]
    fn a_panic_of_any_worker_is_an_error_and_the_pool_lives_on() {
        for count in [1, 2, 4] {
            let mut pool = Pool::new(count).expect("threads can be had");
            for bad in 0..count {
                let job: Arc<dyn Job> = rounds(count, 10, Some((bad, 4)));
                let message = pool.run(&job).expect_err("the job panics");
                assert!(message.contains("told to panic"), "found: {message}");
                let good: Arc<dyn Job> = rounds(count, 10, None);
                pool.run(&good).expect("the pool still works");
            }
        }
    }

    #[test]
    fn shares_cover_all_items_once_and_a_single_item_is_worker_0s() {
        let pool = Pool::new(3).expect("threads can be had");
        for items in [0, 1, 2, 3, 7, 100] {
            let shares: Vec<_> = (0..3)
                .map(|index| {
                    Worker {
                        index,
                        count: 3,
                        shared: &pool.shared,
                    }
                    .share(items)
                })
                .collect();
            assert_eq!(shares[0].start, 0);
            assert_eq!(shares[2].end, items);
            assert!(shares.windows(2).all(|w| w[0].end == w[1].start));
        }
        assert_eq!(
            Worker {
                index: 0,
                count: 3,
                shared: &pool.shared
            }
            .share(1),
            0..1
        );
    }
}
