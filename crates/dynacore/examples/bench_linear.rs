//! Times the linear kernels next to a streaming read in the same process.
//!
//! `cargo run --release -p dynacore --example bench_linear -- [threads=1,2] [types=Q4_K,F16] [rows=1,4,512]
//! [k=2048] [isa=avx2]
//! [form=records|short|tiles]`
//!
//! For each type, several matrices `[4096, k]` of random weights, together far larger than the caches, are multiplied
//! one after another with the given numbers of rows of activations, in the form that `auto` mode takes for so many rows
//! unless another is named. Printed are the weights' bytes per second (and
//! their share of a streaming read by as many threads) and multiply-adds per second.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dynacore::WeightBytes;
use dynacore::cpu::isa::Isa;
use dynacore::cpu::ops::linear::{Form, Meets, Prepared, form, form_bytes, prepare_all, run};
use dynacore::cpu::pack::{PackedLinear, pack};
use dynacore::cpu::table::KernelTable;
use dynair::{DType, QuantType, WeightDecl};

/// Output rows of a matrix.
const ROWS: usize = 4096;
/// Bytes of weights that one sample reads.
const SAMPLE_BYTES: usize = 4 << 20;
/// Bytes of weights that the samples go round.
const PASS_BYTES: usize = 192 << 20;

fn main() {
    let mut threads = vec![1, 2];
    let mut types: Vec<DType> = DType::WEIGHTS.to_vec();
    let mut rows = vec![1, 2, 4, 8, 16, 512];
    let mut cols = 2048;
    let mut fixed = None;
    let mut isa = Isa::from_env().expect("the cap names an instruction set this CPU has");
    for arg in std::env::args().skip(1) {
        let (name, value) = arg.split_once('=').unwrap_or((&arg, ""));
        let numbers = || {
            value
                .split(',')
                .map(|v| v.parse().expect("a list of numbers"))
                .collect::<Vec<usize>>()
        };
        match name {
            "threads" => threads = numbers(),
            "rows" => rows = numbers(),
            "k" => cols = numbers()[0],
            "isa" => isa = Isa::detect(Some(value)).expect("an instruction set this CPU has"),
            "form" => {
                fixed = Some(match value {
                    "records" => Form::Records,
                    "short" => Form::Short,
                    "tiles" => Form::Tiles,
                    _ => panic!("{arg}: expected form=records, form=short or form=tiles"),
                });
            }
            "types" => {
                types = value
                    .split(',')
                    .map(|t| DType::from_name(t).expect("a weight type"))
                    .collect();
            }
            _ => panic!("{arg}: expected threads=, types=, rows=, k=, isa= or form="),
        }
    }
    let table = KernelTable::of(isa).expect("it was detected");
    println!("{isa}, matrices [{ROWS}, {cols}]; GB/s of weights (share of a streaming read), GMAC/s");
    let x: Vec<f32> = (0..cols)
        .map(|i| ((i * 37 % 1000) as f32 - 500.0) * 0.002)
        .collect();
    for form in [Form::Records, Form::Short] {
        let mut scratch = vec![0; form_bytes(table, form, 1, cols)];
        let seconds = best(2000, |_| {
            let start = Instant::now();
            prepare_all(table, form, std::hint::black_box(&x), cols, &mut scratch);
            start.elapsed().as_secs_f64()
        });
        println!(
            "a row of {cols} activations is prepared ({form:?}) in {:.2} us",
            seconds * 1e6
        );
    }
    let stream: Vec<u64> = (0..PASS_BYTES as u64 / 8).collect();
    for dtype in types {
        let weights = matrices(table, dtype, cols);
        for &threads in &threads {
            print!("{dtype:>5} {threads}t");
            for &n in &rows {
                let read = streaming(&stream, threads);
                let form = fixed.unwrap_or_else(|| form(table, n, cols, Meets::of(false, [dtype])));
                let (bytes, macs) = time(table, &weights, (n, form), threads);
                print!(
                    "  {n:>3}: {bytes:5.2} ({:3.0} %) {macs:5.1}",
                    100.0 * bytes / read
                );
            }
            println!();
        }
    }
}

fn matrices(table: &KernelTable, dtype: DType, cols: usize) -> Vec<PackedLinear> {
    let bytes = dtype.row_bytes(cols).expect("k is a whole number of blocks") * ROWS;
    let mut state = 1u64;
    // Codes are random; factors too, but small bit patterns of f16 are finite.
    let mut data: Vec<u8> = (0..bytes)
        .map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 58) as u8
        })
        .collect();
    if dtype == DType::Quant(QuantType::Mxfp4) {
        // Small exponents would make products subnormal, which takes the CPU ten times as long.
        data.chunks_exact_mut(dtype.block().1).for_each(|b| b[0] |= 64);
    }
    let data: Arc<[u8]> = data.into();
    let decl = WeightDecl {
        name: "w".into(),
        dtype,
        first_row: 0,
        rows: ROWS,
        cols,
        experts: 1,
    };
    let mut seconds = f64::INFINITY;
    let weights: Vec<_> = (0..PASS_BYTES.div_ceil(bytes))
        .map(|_| {
            let start = Instant::now();
            let w =
                pack(table, &decl, &WeightBytes::Owned(data.clone())).expect("the bytes fit the declaration");
            seconds = seconds.min(start.elapsed().as_secs_f64());
            w
        })
        .collect();
    println!("{dtype:>5} packed at {:.2} GB/s", bytes as f64 / seconds / 1e9);
    weights
}

/// Runs `job(worker, sample)` for each sample on each thread; the threads stay, and start each sample together. Gives the
/// seconds of the best sample, until its last thread ended. The first samples warm up and do not count.
fn best_together(threads: usize, samples: usize, job: impl Fn(usize, usize) + Sync) -> f64 {
    /// Samples that do not count.
    const WARM_UP: usize = 2;
    let (ready, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let longest = AtomicU64::new(0);
    let mut all = f64::INFINITY;
    let wait = |counter: &AtomicUsize, round: usize| {
        counter.fetch_add(1, Ordering::SeqCst);
        while counter.load(Ordering::SeqCst) < threads * (round + 1) {
            std::hint::spin_loop();
        }
    };
    let work = |worker: usize, sample: usize| {
        wait(&ready, sample);
        let start = Instant::now();
        job(worker, sample);
        longest.fetch_max(start.elapsed().as_nanos() as u64, Ordering::SeqCst);
        wait(&ended, sample);
    };
    std::thread::scope(|s| {
        for worker in 1..threads {
            let work = &work;
            s.spawn(move || (0..samples + WARM_UP).for_each(|sample| work(worker, sample)));
        }
        for sample in 0..samples + WARM_UP {
            longest.store(0, Ordering::SeqCst);
            work(0, sample);
            let seconds = longest.load(Ordering::SeqCst) as f64 / 1e9;
            if sample >= WARM_UP {
                all = all.min(seconds);
            }
        }
    });
    all
}

/// The best of many short samples: what the kernels do when nothing else takes the cores. `sample(i)` gives seconds.
fn best(samples: usize, mut sample: impl FnMut(usize) -> f64) -> f64 {
    (0..samples).map(&mut sample).fold(f64::INFINITY, f64::min)
}

/// GB/s of a plain sum.
fn streaming(data: &[u64], threads: usize) -> f64 {
    let parts: Vec<&[u64]> = data.chunks_exact(SAMPLE_BYTES / 8 / threads).collect();
    let seconds = best_together(threads, parts.len() / threads - 2, |worker, i| {
        let part = parts[i * threads + worker];
        std::hint::black_box(part.iter().fold(0u64, |a, b| a.wrapping_add(*b)));
    });
    (SAMPLE_BYTES / threads * threads) as f64 / seconds / 1e9
}

/// GB/s of weights and GMAC/s with `n` rows in a form.
fn time(
    table: &KernelTable,
    weights: &[PackedLinear],
    (n, form): (usize, Form),
    threads: usize,
) -> (f64, f64) {
    let cols = weights[0].cols();
    let row_bytes = weights[0].dtype().row_bytes(cols).expect("whole blocks");
    let x: Vec<f32> = (0..n * cols)
        .map(|i| ((i * 37 % 1000) as f32 - 500.0) * 0.002)
        .collect();
    let bytes = form_bytes(table, form, n, cols);
    let mut scratch = vec![0; bytes + 64];
    let at = scratch.as_ptr().align_offset(64);
    let scratch = &mut scratch[at..at + bytes];
    prepare_all(table, form, &x, cols, scratch);
    let prepared = Prepared::of(form, scratch);
    // A sample takes about a millisecond, so that some of them are not interrupted.
    let each = if n >= 64 {
        if form == Form::Tiles { 512 } else { 64 }
    } else {
        (SAMPLE_BYTES / row_bytes).min(ROWS) / threads / n.div_ceil(8) / 16 * 16
    };
    let outs: Vec<_> = (0..threads).map(|_| Mutex::new(vec![0.0f32; n * each])).collect();
    let seconds = best_together(threads, 200, |worker, i| {
        let mut out = outs[worker].lock().expect("each worker has its own");
        // Every sample reads other weights; neighbours in memory follow later.
        let share = (i * 7 + worker) % (ROWS / each);
        let first = share * each;
        run(
            table,
            &weights[i % weights.len()],
            None,
            &x,
            prepared,
            first..first + each,
            |row, column, values| {
                out[row * each + column - first..][..values.len()].copy_from_slice(values);
            },
        );
        std::hint::black_box(&out);
    });
    let outputs = (threads * each) as f64;
    (
        outputs * row_bytes as f64 / seconds / 1e9,
        outputs * (n * cols) as f64 / seconds / 1e9,
    )
}
