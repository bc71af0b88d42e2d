//! Times the worker pool: what a stage costs that has nothing to do, and what a step loses to busy neighbours.
//!
//! `cargo run --release -p dynacore --example bench_pool -- [threads=1,2] [hogs=0,1,2] [ms=400]`
//!
//! Stages are walked many at a time: with an empty item, so that one worker may walk them alone, and with one short item for
//! each worker, so that all meet at its end; what that costs besides the item is what a barrier costs. Least and median
//! are printed. A *step* is made of what decoding one token of a small model is: a few hundred stages of short items that compute and
//! touch no memory. Hogs are threads of this process that only compute; rounds with and without them alternate, so that
//! other programs of the machine disturb both alike. `share` is the speed with hogs by that without, beside the share of
//! the cores that the workers are due when the scheduler treats all threads alike.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dynacore::cpu::pool::{Job, Pool};

/// Rounds of each measurement.
const ROUNDS: usize = 21;
/// Stages of a walk whose stages have next to nothing to do.
const BARE_STAGES: usize = 500;
/// Turns of [`work`] of an item that is just long enough for all workers to get one.
const MEETING_TURNS: u64 = 2000;
/// Stages of a step.
const STAGES: usize = 200;
/// Items of a stage by worker: what the products of a step are cut into.
const ITEMS_PER_WORKER: usize = 8;
/// Turns of [`work`] that an item takes: about 5 µs.
const ITEM_TURNS: u64 = 4000;

struct Stages {
    count: usize,
    items: usize,
    turns: u64,
}

impl Job for Stages {
    fn stages(&self) -> usize {
        self.count
    }
    fn items(&self, _: usize) -> usize {
        self.items
    }
    fn run(&self, _: usize, item: usize, _: usize) {
        black_box(work(self.turns, item as u64));
    }
    fn done(&self, _: usize) {}
}

/// A chain of multiplications that depend on each other.
fn work(turns: u64, seed: u64) -> u64 {
    (0..turns).fold(seed, |x, i| black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let (mut threads, mut hogs, mut ms) = (vec![1, 2], vec![1, 2], 400);
    for arg in std::env::args().skip(1) {
        let (name, value) = arg.split_once('=').unwrap_or((&arg, ""));
        let numbers = || {
            let all = value.split(',').filter(|v| !v.is_empty());
            all.map(|v| v.parse().expect("a list of numbers")).collect()
        };
        match name {
            "threads" => threads = numbers(),
            "hogs" => hogs = numbers(),
            "ms" => ms = value.parse().expect("a number of milliseconds"),
            _ => panic!("{arg}: expected threads=, hogs= or ms="),
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores");
    for count in threads {
        let mut pool = Pool::new(count).expect("threads can be had");
        stage(&mut pool, "a stage of an empty item", 1, 0, 0.0);
        let item_ns = work_ns(MEETING_TURNS);
        let name = format!("a stage of an item of {item_ns:.0} ns for each, besides it");
        stage(&mut pool, &name, count, MEETING_TURNS, item_ns);
        for &hogs in &hogs {
            shared(&mut pool, hogs, cores, Duration::from_millis(ms));
        }
    }
}

/// Prints the least and the median time of a stage of `items` items of `turns` turns each, less `item_ns`.
fn stage(pool: &mut Pool, name: &str, items: usize, turns: u64, item_ns: f64) {
    let mut ns = Vec::new();
    for _ in 0..10 * ROUNDS {
        let count = BARE_STAGES;
        let job = Arc::new(Stages { count, items, turns });
        let start = Instant::now();
        pool.run(job).expect("no item panics");
        ns.push(start.elapsed().as_nanos() as f64 / count as f64 - item_ns);
    }
    let median = median(&mut ns);
    println!(
        "{} threads, {name}: {:.0} ns least, {median:.0} ns median",
        pool.count(),
        ns[0]
    );
}

/// The time that [`work`] takes, nanoseconds.
fn work_ns(turns: u64) -> f64 {
    let time = |i| {
        let start = Instant::now();
        black_box(work(turns, i));
        start.elapsed().as_nanos() as f64
    };
    median(&mut (0..1001).map(time).collect::<Vec<_>>())
}

/// Steps per second, and the longest step, of `time`.
fn steps(pool: &mut Pool, time: Duration) -> (f64, Duration) {
    let job = Arc::new(Stages {
        count: STAGES,
        items: ITEMS_PER_WORKER * pool.count(),
        turns: ITEM_TURNS,
    });
    let (start, mut count, mut longest) = (Instant::now(), 0, Duration::ZERO);
    while start.elapsed() < time {
        let step = Instant::now();
        pool.run(Arc::clone(&job) as Arc<dyn Job>)
            .expect("no item panics");
        longest = longest.max(step.elapsed());
        count += 1;
    }
    (f64::from(count) / start.elapsed().as_secs_f64(), longest)
}

fn shared(pool: &mut Pool, hogs: usize, cores: usize, time: Duration) {
    let (mut alone, mut beside, mut shares, mut longest) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let before = steps(pool, time).0;
        let stop = AtomicBool::new(false);
        let (with, worst) = std::thread::scope(|scope| {
            for seed in 0..hogs as u64 {
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        black_box(work(ITEM_TURNS, seed));
                    }
                });
            }
            let found = steps(pool, time);
            stop.store(true, Ordering::Relaxed);
            found
        });
        alone.push(before);
        beside.push(with);
        shares.push(with / before);
        longest.push(worst.as_secs_f64() * 1e3);
    }
    let workers = pool.count();
    let due = (cores as f64 / (workers + hogs) as f64).min(1.0) * workers as f64 / workers.min(cores) as f64;
    println!(
        "{workers} threads, {hogs} hogs: {:.1} steps/s alone, {:.1} beside; share {:.2} (due {:.2}), longest step {:.1} ms",
        median(&mut alone),
        median(&mut beside),
        median(&mut shares),
        due.min(1.0),
        median(&mut longest)
    );
}
