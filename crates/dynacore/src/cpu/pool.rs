//! Worker threads that walk a step together.
//!
//! A [`Pool`] spawns its threads once. [`Pool::run`] lets them, and the calling thread as worker 0, walk the stages of
//! one [`Job`]. A stage is a number of items; workers take items from its counter, and go on to the next stage when
//! all items *are done*, not when all workers have arrived. A worker whose core was taken by another program holds
//! nobody up unless it stops in the middle of an item; when it comes back it passes the finished stages and joins the
//! one at hand. Waiting is spin-then-park: the usual wait of a few microseconds costs no system call, a longer one
//! leaves the core to others. Between items a worker offers its core to others when its time slice ends ([`turn`]), so
//! that the scheduler takes it there and seldom in the middle of an item. A panic in an item ends the job for all, and
//! `run` gives an error.
//!
//! Memory the workers share is in [`shared`].

pub(crate) mod shared;
mod turn;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use turn::{Turn, time_slice};

/// How long a waiting thread spins before it parks: longer than the skew between workers at the end of a stage, about what
/// parking and waking cost. By the clock, because a pause takes ten cycles on some processors and 140 on others.
const SPIN: Duration = Duration::from_micros(50);

/// Pauses between two looks at the clock.
const PAUSES: u32 = 32;

/// What workers run. Items of a stage may run in any order and at once; stages follow each other.
pub trait Job: Send + Sync {
    /// Number of stages.
    fn stages(&self) -> usize;
    /// Items of a stage.
    fn items(&self, stage: usize) -> usize;
    /// Runs an item; `worker` is the number of the worker.
    fn run(&self, stage: usize, item: usize, worker: usize);
    /// Called once when all items of a stage are done, before any item of the next starts.
    fn done(&self, stage: usize);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard stays meaningful whatever panicked meanwhile.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where threads wait for a condition.
#[derive(Default)]
struct Gate {
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Gate {
    /// Waits until `ready`, which others make true before they call [`Gate::notify`]. Returns whether the thread parked.
    fn wait(&self, ready: impl Fn() -> bool) -> bool {
        let mut start = None;
        loop {
            for _ in 0..PAUSES {
                if ready() {
                    return false;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() >= SPIN {
                break;
            }
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, SeqCst);
        // Either this sees the condition, or `notify` sees the sleeper: both sides are sequentially consistent.
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
        true
    }

    fn notify(&self) {
        if self.sleepers.load(SeqCst) > 0 {
            let _guard = lock(&self.lock);
            self.wake.notify_all();
        }
    }
}

/// Progress of a stage; a cache line of its own.
#[repr(align(64))]
struct Stage {
    items: usize,
    next: AtomicUsize,
    finished: AtomicUsize,
    complete: AtomicBool,
}

/// A job on its way.
struct Walk {
    job: Arc<dyn Job>,
    stages: Vec<Stage>,
    failed: AtomicBool,
    message: Mutex<Option<String>>,
}

impl Walk {
    fn new(job: Arc<dyn Job>) -> Walk {
        let stages = (0..job.stages()).map(|i| {
            let items = job.items(i);
            Stage {
                items,
                next: AtomicUsize::new(0),
                finished: AtomicUsize::new(0),
                complete: AtomicBool::new(items == 0),
            }
        });
        Walk {
            stages: stages.collect(),
            job,
            failed: AtomicBool::new(false),
            message: Mutex::default(),
        }
    }

    fn walk(&self, worker: usize, gate: &Gate, turn: &mut Turn) {
        for (i, stage) in self.stages.iter().enumerate() {
            turn.before_stage();
            while !stage.complete.load(SeqCst) {
                if self.failed.load(SeqCst) {
                    return;
                }
                if stage.next.load(Relaxed) < stage.items {
                    turn.before_item();
                }
                let item = stage.next.fetch_add(1, SeqCst);
                if item >= stage.items {
                    if gate.wait(|| stage.complete.load(SeqCst) || self.failed.load(SeqCst)) {
                        turn.begin();
                    }
                    continue;
                }
                let run = || {
                    self.job.run(i, item, worker);
                    if stage.finished.fetch_add(1, SeqCst) + 1 == stage.items {
                        self.job.done(i);
                        stage.complete.store(true, SeqCst);
                        gate.notify();
                    }
                };
                if let Err(payload) = catch_unwind(AssertUnwindSafe(run)) {
                    lock(&self.message).get_or_insert(message_of(&*payload));
                    self.failed.store(true, SeqCst);
                    gate.notify();
                }
            }
        }
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

struct Shared {
    current: Mutex<Option<Arc<Walk>>>,
    /// Number of jobs started.
    started: AtomicUsize,
    stop: AtomicBool,
    /// Where idle workers wait for a job.
    idle: Gate,
    /// Where workers wait for the end of a stage.
    stages: Gate,
}

impl Shared {
    fn worker_loop(&self, index: usize, mut turn: Turn) {
        let mut seen = 0;
        loop {
            let new = || self.started.load(SeqCst) != seen || self.stop.load(SeqCst);
            if self.idle.wait(new) {
                turn.begin();
            }
            seen = self.started.load(SeqCst);
            if self.stop.load(SeqCst) {
                return;
            }
            let walk = lock(&self.current).clone();
            if let Some(walk) = walk {
                walk.walk(index, &self.stages, &mut turn);
            }
        }
    }
}

/// The worker threads of a device.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Of whoever calls [`Pool::run`].
    turn: Turn,
}

impl Pool {
    /// A pool of `count` workers: `count − 1` threads and whoever calls [`Pool::run`].
    ///
    /// # Errors
    /// If the operating system refuses a thread.
    pub fn new(count: usize) -> std::io::Result<Pool> {
        assert!(count >= 1, "a pool has at least one worker");
        let shared = Arc::new(Shared {
            current: Mutex::default(),
            started: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            idle: Gate::default(),
            stages: Gate::default(),
        });
        // A worker alone holds up nobody else.
        let slice = if count > 1 { time_slice() } else { Duration::MAX };
        let mut pool = Pool {
            shared,
            threads: Vec::new(),
            turn: Turn::new(slice),
        };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("cpu-worker-{index}"))
                .spawn(move || shared.worker_loop(index, Turn::new(slice)))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Number of workers.
    pub fn count(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `job` and returns when all its stages are done. A worker may still hold the job for a moment then, but
    /// runs no item of it.
    ///
    /// # Errors
    /// The message of the first panic of an item; other items may still be running then. The pool stays usable.
    pub fn run(&mut self, job: Arc<dyn Job>) -> Result<(), String> {
        let shared = &*self.shared;
        let walk = Arc::new(Walk::new(job));
        // One item at a time is for one worker: nobody is woken for it.
        if !self.threads.is_empty() && walk.stages.iter().any(|stage| stage.items > 1) {
            *lock(&shared.current) = Some(Arc::clone(&walk));
            shared.started.fetch_add(1, SeqCst);
            shared.idle.notify();
        }
        walk.walk(0, &shared.stages, &mut self.turn);
        *lock(&shared.current) = None;
        if walk.failed.load(SeqCst) {
            return Err(lock(&walk.message)
                .take()
                .unwrap_or_else(|| "no message".to_owned()));
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.idle.notify();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of its items, so joining cannot fail in a way worth a second panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rounds {
        counters: Vec<AtomicUsize>,
        items: usize,
        panic_at: Option<(usize, usize)>,
    }

    impl Job for Rounds {
        fn stages(&self) -> usize {
            self.counters.len()
        }
        fn items(&self, stage: usize) -> usize {
            // Some stages are empty, some a single item.
            match stage % 5 {
                0 => 1,
                1 => 0,
                _ => self.items,
            }
        }
        fn run(&self, stage: usize, item: usize, _: usize) {
            assert!(self.panic_at != Some((stage, item)), "told to panic");
            for (before, counter) in self.counters[..stage].iter().enumerate() {
                assert_eq!(
                    counter.load(SeqCst),
                    self.items(before),
                    "a stage began before all before it were done"
                );
            }
            self.counters[stage].fetch_add(1, SeqCst);
        }
        fn done(&self, stage: usize) {
            assert_eq!(
                self.counters[stage].load(SeqCst),
                self.items(stage),
                "done comes after the last item"
            );
        }
    }

    fn rounds(stages: usize, items: usize, panic_at: Option<(usize, usize)>) -> Arc<Rounds> {
        let counters = (0..stages).map(|_| AtomicUsize::new(0)).collect();
        Arc::new(Rounds {
            counters,
            items,
            panic_at,
        })
    }

    #[test]
    fn stages_follow_each_other_with_more_threads_than_cores() {
        for count in [1, 2, 3, 9] {
            let mut pool = Pool::new(count).expect("threads can be had");
            assert_eq!(pool.count(), count);
            for _ in 0..20 {
                let job = rounds(60, 7, None);
                pool.run(job.clone()).expect("no panic");
                assert!((0..60).all(|i| job.counters[i].load(SeqCst) == job.items(i)));
            }
        }
    }

    #[test]
    fn short_stages_of_more_workers_than_cores_wait_for_no_time_slices() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut pool = Pool::new(4 * cores).expect("threads can be had");
        let begin = Instant::now();
        for _ in 0..100 {
            pool.run(rounds(50, 2 * cores, None)).expect("no panic");
        }
        // If a stage waited until every worker has had its turn on a core, each of these 5000 would take some milliseconds.
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(15), "{took:?}");
    }

    #[test]
    fn a_panic_in_any_item_is_an_error_and_the_pool_lives_on() {
        for count in [1, 2, 4] {
            let mut pool = Pool::new(count).expect("threads can be had");
            for bad in [(0, 0), (3, 0), (4, 6), (9, 3)] {
                let message = pool.run(rounds(10, 7, Some(bad))).expect_err("the job panics");
                assert!(message.contains("told to panic"), "found: {message}");
                pool.run(rounds(10, 7, None)).expect("the pool still works");
            }
        }
    }
}
