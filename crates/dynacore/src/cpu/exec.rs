//! The CPU executor: checks a step, does its block copies, and lets all workers walk the plan's phases.
//!
//! Between two phases stands a barrier unless both are single items, which worker 0 does by itself; phases without
//! items are passed over. Work of uneven cost (columns of products, attention items) is taken from a counter,
//! everything else is split evenly. Who computes an item never changes its result.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use dynair::verify::{self, Pools};
use dynair::{BatchMeta, Limits, Plan};

use super::kernels::ops::OpTable;
use super::ops::attention::{Items, Layer, Scratch};
use super::ops::linear;
use super::ops::rows::Rows;
use super::pool::shared::SharedMem;
use super::pool::{Aborted, Job, Pool, Worker};
use super::program::{Linear, Phase, Program, Size, Val};
use super::storage::CpuKv;
use super::table::KernelTable;
use crate::buffer::Tensor;
use crate::device::{Executor, Logits, Ticket};
use crate::error::{Error, Result};
use crate::kv::KvGeometry;

/// Pieces the columns of a product are cut into per worker: enough that a worker whose core is shared falls behind by
/// little, few enough that a piece streams long.
const PIECES_PER_WORKER: usize = 8;

/// A lock whose data stays meaningful when a holder panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A plan bound to weights, cache and the device's workers.
pub struct CpuExecutor {
    inner: Arc<Inner>,
    job: Arc<dyn Job>,
    pool: Arc<Mutex<Pool>>,
    geometry: KvGeometry,
    next_ticket: u64,
    in_flight: Option<(u64, Size)>,
    poisoned: Option<String>,
}

/// Nanoseconds worker 0 spent in a phase, with the barrier before it.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseTime {
    /// Label of the plan's step.
    pub label: Arc<str>,
    /// What the phase does.
    pub phase: &'static str,
    /// Work, nanoseconds.
    pub work_ns: u64,
    /// Waiting at the barrier before it, nanoseconds.
    pub wait_ns: u64,
}

/// What workers see of the executor.
struct Inner {
    table: &'static KernelTable,
    ops: &'static OpTable,
    program: Program,
    limits: Limits,
    kv: CpuKv,
    arena: SharedMem<f32>,
    /// Prepared activations of the product at hand.
    prepared: SharedMem<u8>,
    /// Per rotation `[max_tokens][2 · pairs]`.
    angles: Vec<SharedMem<f32>>,
    /// Per phase the next piece of work.
    next: Vec<AtomicUsize>,
    scratch: Vec<Mutex<WorkerScratch>>,
    step: RwLock<StepState>,
}

struct WorkerScratch {
    attention: Scratch,
    turned: Vec<f32>,
}

/// The step at hand.
struct StepState {
    batch: BatchMeta,
    size: Size,
    /// Per cache group each row's block and slot.
    places: Vec<Vec<(u32, u32)>>,
    /// Per attention class.
    items: Vec<Items>,
    /// Memory for the parts of split attention; grown when a step needs more.
    parts: SharedMem<f32>,
    /// Filled by worker 0 when asked for.
    times: Option<Mutex<Vec<PhaseTime>>>,
}

/// How much a phase has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Nothing,
    /// One item: worker 0's.
    Serial,
    Parallel,
}

impl Load {
    fn of(items: usize) -> Load {
        match items {
            0 => Load::Nothing,
            1 => Load::Serial,
            _ => Load::Parallel,
        }
    }
}

fn out_of_memory(bytes: usize, what: &str) -> Error {
    Error::OutOfMemory {
        device: "cpu".into(),
        bytes,
        what: what.into(),
    }
}

impl CpuExecutor {
    /// See [`crate::Device::compile`].
    pub(super) fn new(
        plan: &Plan,
        weights: &[Tensor],
        kv: CpuKv,
        geometry: KvGeometry,
        table: &'static KernelTable,
        pool: Arc<Mutex<Pool>>,
    ) -> Result<CpuExecutor> {
        let ops = OpTable::of(table.isa).ok_or_else(|| Error::Unsupported {
            device: "cpu".into(),
            what: format!("the instruction set `{}`", table.isa),
        })?;
        let program = super::program::lower(plan, weights, &kv)?;
        let most = Size {
            tokens: plan.limits.max_tokens,
            outputs: plan.limits.max_outputs,
        };
        let mut prepared = 0usize;
        for (phase, _) in &program.phases {
            if let Phase::Prepare { x } = phase {
                let bytes = linear::scratch_bytes(table, x.width).checked_mul(x.bind(most));
                prepared = prepared.max(bytes.ok_or_else(|| out_of_memory(usize::MAX, "activations"))?);
            }
        }
        let zeroed = |len: usize, what| SharedMem::zeroed(len).ok_or_else(|| out_of_memory(4 * len, what));
        let angles = program
            .ropes
            .iter()
            .map(|r| zeroed(most.tokens * 2 * r.pairs(), "rotations"));
        let workers = lock(&pool).count();
        let head_dim = kv.caches.iter().map(|c| c.head_dim).max().unwrap_or(0);
        let row = kv
            .caches
            .iter()
            .map(|c| c.head_dim * c.num_kv_heads)
            .max()
            .unwrap_or(0);
        let scratch = (0..workers).map(|_| {
            Mutex::new(WorkerScratch {
                attention: Scratch::new(head_dim, geometry.block_tokens),
                turned: vec![0.0; row],
            })
        });
        let inner = Arc::new(Inner {
            table,
            ops,
            limits: plan.limits,
            arena: zeroed(program.arena, "intermediate values")?,
            prepared: SharedMem::zeroed(prepared).ok_or_else(|| out_of_memory(prepared, "activations"))?,
            angles: angles.collect::<Result<_>>()?,
            next: program.phases.iter().map(|_| AtomicUsize::new(0)).collect(),
            scratch: scratch.collect(),
            step: RwLock::new(StepState {
                batch: BatchMeta::default(),
                size: Size::default(),
                places: Vec::new(),
                items: Vec::new(),
                parts: zeroed(0, "attention")?,
                times: None,
            }),
            program,
            kv,
        });
        let job: Arc<dyn Job> = Arc::new(Walk(Arc::clone(&inner)));
        Ok(CpuExecutor {
            inner,
            job,
            pool,
            geometry,
            next_ticket: 0,
            in_flight: None,
            poisoned: None,
        })
    }

    /// Executes a step as [`Executor::submit`] and [`Executor::wait`] do and gives the time of each phase; the cache
    /// is written as in any step.
    ///
    /// # Errors
    /// As [`Executor::submit`].
    pub fn profile(&mut self, batch: &BatchMeta) -> Result<Vec<PhaseTime>> {
        self.step(batch, true)?;
        let mut step = self.inner.step.write().unwrap_or_else(PoisonError::into_inner);
        let times = step.times.take().expect("the step was executed with times");
        Ok(times.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks everything about `batch` that the workers rely on.
    fn check(&self, batch: &BatchMeta) -> Result<()> {
        let program = &self.inner.program;
        let pools = Pools {
            block_tokens: self.geometry.block_tokens,
            blocks: &self.geometry.blocks[..program.windows.len()],
            windows: &program.windows,
            vocab_size: program.vocab_size,
        };
        verify::batch(batch, &self.inner.limits, &pools).map_err(|e| Error::Batch(e.to_string()))?;
        self.check_writes(batch)
    }

    /// No block may be written by two sequences: their rows are written by different workers at once.
    fn check_writes(&self, batch: &BatchMeta) -> Result<()> {
        for (group, table) in batch.tables.iter().enumerate() {
            let mut written = Vec::new();
            for (s, seq) in batch.seqs.iter().enumerate() {
                let blocks = &table.blocks[table.first[s] as usize..table.first[s + 1] as usize];
                let block_of = |p: u32| (p - table.start[s]) as usize / self.geometry.block_tokens;
                let first = block_of(seq.context_len - seq.rows);
                written.extend(
                    blocks[first..=block_of(seq.context_len - 1)]
                        .iter()
                        .map(|b| (b.0, s)),
                );
            }
            written.sort_unstable();
            if let Some(w) = written.windows(2).find(|w| w[0].0 == w[1].0) {
                return Err(Error::Batch(format!(
                    "rule `written-blocks`: block {} of cache group {group} is written by sequences {} and {}",
                    w[0].0, w[0].1, w[1].1
                )));
            }
        }
        Ok(())
    }

    fn step(&mut self, batch: &BatchMeta, timed: bool) -> Result<Size> {
        if let Some(message) = &self.poisoned {
            return Err(Error::Worker {
                device: "cpu".into(),
                message: message.clone(),
            });
        }
        self.check(batch)?;
        self.begin(batch, timed)?;
        self.copy_blocks(batch);
        for next in &self.inner.next {
            next.store(0, Relaxed);
        }
        self.inner.new_phase();
        let outcome = lock(&self.pool).run(&self.job);
        self.inner.new_phase();
        if let Err(message) = outcome {
            self.poisoned = Some(message.clone());
            return Err(Error::Worker {
                device: "cpu".into(),
                message,
            });
        }
        Ok(Size {
            tokens: batch.tokens.len(),
            outputs: batch.output_rows.len(),
        })
    }

    /// Derives what the workers need from the batch.
    fn begin(&self, batch: &BatchMeta, timed: bool) -> Result<()> {
        let inner = &*self.inner;
        let items: Vec<Items> = inner
            .program
            .classes
            .iter()
            .map(|class| Items::new(class, batch, inner.scratch.len()))
            .collect();
        let parts = items.iter().map(|i| i.part_elements).max().unwrap_or(0);
        let mut step = inner.step.write().unwrap_or_else(PoisonError::into_inner);
        if parts > step.parts.len() {
            step.parts = SharedMem::zeroed(parts).ok_or_else(|| out_of_memory(4 * parts, "attention"))?;
        }
        let block_tokens = self.geometry.block_tokens;
        step.places = batch
            .tables
            .iter()
            .map(|table| {
                let mut places = Vec::with_capacity(batch.tokens.len());
                for (s, seq) in batch.seqs.iter().enumerate() {
                    let first = table.first[s] as usize;
                    for row in seq.first_row..seq.first_row + seq.rows {
                        let offset = (batch.positions[row as usize] - table.start[s]) as usize;
                        let block = table.blocks[first + offset / block_tokens].0;
                        places.push((block, (offset % block_tokens) as u32));
                    }
                }
                places
            })
            .collect();
        step.items = items;
        step.size = Size {
            tokens: batch.tokens.len(),
            outputs: batch.output_rows.len(),
        };
        step.batch.clone_from(batch);
        step.times = timed.then(Mutex::default);
        Ok(())
    }

    /// The step's copies of whole blocks, in all layers of each group, in order.
    fn copy_blocks(&self, batch: &BatchMeta) {
        for cache in &self.inner.kv.caches {
            let bytes = cache.block_bytes();
            for (from, to) in &batch.tables[cache.group].copies {
                if from == to {
                    continue;
                }
                let (from, to) = (from.0 as usize * bytes, to.0 as usize * bytes);
                cache
                    .mem
                    .write(to..to + bytes)
                    .copy_from_slice(cache.mem.read(from..from + bytes));
            }
        }
    }
}

impl Executor for CpuExecutor {
    fn submit(&mut self, batch: &BatchMeta) -> Result<Ticket> {
        if let Some((ticket, _)) = self.in_flight {
            return Err(Error::Batch(format!(
                "step {ticket} is in flight and must be waited for first"
            )));
        }
        let size = self.step(batch, false)?;
        self.next_ticket += 1;
        self.in_flight = Some((self.next_ticket, size));
        Ok(Ticket(self.next_ticket))
    }

    fn wait(&mut self, ticket: Ticket, logits: &mut Logits) -> Result<()> {
        match self.in_flight {
            Some((number, size)) if number == ticket.0 => {
                self.in_flight = None;
                let from = self.inner.arena.read(self.inner.program.logits.range(size));
                logits.data.clear();
                logits.data.extend_from_slice(from);
                logits.vocab = self.inner.program.logits.width;
                Ok(())
            }
            _ => Err(Error::Batch(format!(
                "ticket {} is of no step in flight",
                ticket.0
            ))),
        }
    }
}

struct Walk(Arc<Inner>);

impl Job for Walk {
    fn run(&self, worker: &Worker<'_>) -> Result<(), Aborted> {
        let inner = &*self.0;
        let step = inner.step.read().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = lock(&inner.scratch[worker.index]);
        let timer = step.times.as_ref().filter(|_| worker.index == 0);
        let mut before = Load::Serial;
        for (i, (phase, label)) in inner.program.phases.iter().enumerate() {
            let load = inner.load(phase, &step);
            if load == Load::Nothing {
                continue;
            }
            let arrived = timer.map(|_| Instant::now());
            if load == Load::Parallel || before == Load::Parallel {
                inner.barrier(worker)?;
            }
            before = load;
            let started = timer.map(|_| Instant::now());
            if load == Load::Parallel || worker.index == 0 {
                inner.run(phase, i, worker, &step, &mut scratch);
            }
            if let (Some(times), Some(arrived), Some(started)) = (timer, arrived, started) {
                lock(times).push(PhaseTime {
                    label: Arc::clone(label),
                    phase: phase.name(),
                    work_ns: started.elapsed().as_nanos() as u64,
                    wait_ns: (started - arrived).as_nanos() as u64,
                });
            }
        }
        Ok(())
    }
}

impl Phase {
    fn name(&self) -> &'static str {
        match self {
            Phase::Angles => "angles",
            Phase::Embed { .. } => "embed",
            Phase::Norm { .. } => "rms_norm",
            Phase::AddNorm { .. } => "add_rms_norm",
            Phase::Rope { .. } => "rope",
            Phase::Map { .. } => "map",
            Phase::Zip { .. } => "zip",
            Phase::TakeOutputs { .. } => "take_outputs",
            Phase::KvWrite { .. } => "kv_write",
            Phase::Attention { .. } => "attention",
            Phase::AttentionMerge { .. } => "attention_merge",
            Phase::Prepare { .. } => "prepare",
            Phase::Product { .. } => "product",
        }
    }
}

impl Inner {
    /// Forgets the ledgers of shared memory; they exist in this crate's tests only.
    fn new_phase(&self) {
        if cfg!(test) {
            self.arena.new_phase();
            self.prepared.new_phase();
            self.angles.iter().for_each(SharedMem::new_phase);
            self.kv.caches.iter().for_each(|c| c.mem.new_phase());
            self.step
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .parts
                .new_phase();
        }
    }

    fn barrier(&self, worker: &Worker<'_>) -> Result<(), Aborted> {
        worker.barrier()?;
        if cfg!(test) {
            if worker.index == 0 {
                self.new_phase();
            }
            worker.barrier()?;
        }
        Ok(())
    }

    fn rows<'a>(&'a self, step: &'a StepState) -> Rows<'a> {
        Rows {
            table: self.ops,
            arena: &self.arena,
            size: step.size,
            batch: &step.batch,
            angles: &self.angles,
        }
    }

    fn load(&self, phase: &Phase, step: &StepState) -> Load {
        let rows = self.rows(step);
        Load::of(match phase {
            Phase::Angles => step.size.tokens,
            Phase::Embed { out, .. } | Phase::TakeOutputs { out, .. } => rows.row_items(out),
            Phase::Norm { x, .. } => rows.norm_items(x),
            Phase::AddNorm { a, .. } => rows.norm_items(a),
            Phase::Rope { x, .. } => rows.row_items(x),
            Phase::Map { x, .. } => rows.element_items(x),
            Phase::Zip { a, .. } => rows.element_items(a),
            Phase::KvWrite { k, .. } => rows.row_items(k),
            Phase::Attention { class, .. } => step.items[*class].count(),
            Phase::AttentionMerge { class, .. } => step.items[*class].merge_count(),
            Phase::Prepare { x } if linear::scratch_bytes(self.table, x.width) == 0 => 0,
            Phase::Prepare { x } => rows.row_items(x),
            Phase::Product { x, .. } if x.bind(step.size) == 0 => 0,
            Phase::Product { linear, .. } => pieces(linear, self.scratch.len()).1,
        })
    }

    fn run(
        &self,
        phase: &Phase,
        index: usize,
        worker: &Worker<'_>,
        step: &StepState,
        own: &mut WorkerScratch,
    ) {
        let rows = self.rows(step);
        match phase {
            Phase::Angles => rows.make_angles(&self.program.ropes, worker.share(step.size.tokens)),
            Phase::Embed { weight, out } => rows.embed(weight, out, worker.share(rows.row_items(out))),
            Phase::Norm { x, weight, eps, out } => {
                rows.norm(x, weight, *eps, out, worker.share(rows.norm_items(x)));
            }
            Phase::AddNorm {
                a,
                b,
                weight,
                eps,
                sum,
                out,
            } => {
                rows.add_norm(a, b, weight, *eps, sum, out, worker.share(rows.norm_items(a)));
            }
            Phase::Rope { x, style, table, out } => {
                let pairs = self.program.ropes[*table].pairs();
                rows.rope(x, *style, *table, pairs, out, worker.share(rows.row_items(x)));
            }
            Phase::Map { op, x, out } => rows.map(*op, x, out, worker.share(rows.element_items(x))),
            Phase::Zip { op, a, b, out } => rows.zip(*op, a, b, out, worker.share(rows.element_items(a))),
            Phase::TakeOutputs { x, out } => rows.take_outputs(x, out, worker.share(rows.row_items(out))),
            Phase::KvWrite { k, v, cache, rope } => {
                let cache = &self.kv.caches[*cache];
                let turn = rope.map(|(style, table)| (style, table, self.program.ropes[table].pairs()));
                let places = &step.places[cache.group];
                rows.kv_write(
                    cache,
                    k,
                    v,
                    turn,
                    places,
                    &mut own.turned,
                    worker.share(rows.row_items(k)),
                );
            }
            Phase::Attention {
                q,
                cache,
                class,
                spec,
                out,
            } => {
                let layer = self.layer(step, *class, spec, out);
                let cache = &self.kv.caches[*cache];
                self.each(index, layer.items.count(), |i| {
                    layer.attend(cache, q.at, i, &mut own.attention)
                });
            }
            Phase::AttentionMerge { class, spec, out } => {
                let layer = self.layer(step, *class, spec, out);
                self.each(index, layer.items.merge_count(), |i| {
                    layer.merge_item(i, &mut own.attention)
                });
            }
            Phase::Prepare { x } => self.prepare(x, step, worker.share(rows.row_items(x))),
            Phase::Product { x, linear } => self.product(x, linear, index, step),
        }
    }

    /// Takes items of a phase from its counter until there are none.
    fn each(&self, phase: usize, items: usize, mut run: impl FnMut(usize)) {
        loop {
            let item = self.next[phase].fetch_add(1, Relaxed);
            if item >= items {
                return;
            }
            run(item);
        }
    }

    fn layer<'a>(
        &'a self,
        step: &'a StepState,
        class: usize,
        spec: &'a dynair::AttnSpec,
        out: &Val,
    ) -> Layer<'a> {
        Layer {
            table: self.ops,
            spec,
            items: &step.items[class],
            batch: &step.batch,
            arena: &self.arena,
            out: out.at,
            parts: &step.parts,
        }
    }

    fn prepare(&self, x: &Val, step: &StepState, items: Range<usize>) {
        let rows = super::ops::rows::rows_of(items, x.bind(step.size), x.width);
        let bytes = linear::scratch_bytes(self.table, x.width);
        let out = self.prepared.write(rows.start * bytes..rows.end * bytes);
        linear::prepare(self.table, self.arena.read(x.row_range(rows)), x.width, out);
    }

    fn product(&self, x: &Val, linear: &Linear, index: usize, step: &StepState) {
        let n = x.bind(step.size);
        let values = self.arena.read(x.range(step.size));
        let prepared = self
            .prepared
            .read(0..n * linear::scratch_bytes(self.table, x.width));
        let put = |out: &Val| {
            let out = *out;
            move |row: usize, column: usize, values: &[f32]| {
                let at = out.at + row * out.width + column;
                self.arena.write(at..at + values.len()).copy_from_slice(values);
            }
        };
        let (groups, count) = pieces(linear, self.scratch.len());
        self.each(index, count, |piece| {
            for (member, columns) in columns_of(linear, piece * groups..(piece + 1) * groups) {
                match linear {
                    Linear::Group(members) => {
                        let m = &members[member];
                        let weight = m
                            .weight
                            .matrix
                            .as_ref()
                            .expect("lowering checked the weight's form");
                        let bias = m.bias.as_deref();
                        linear::run(self.table, weight, bias, values, prepared, columns, put(&m.out));
                    }
                    Linear::Glu { gate, up, act, out } => {
                        let form = "lowering checked the weight's form";
                        let pair = [gate, up].map(|w| w.matrix.as_ref().expect(form));
                        linear::run_glu(self.table, pair, *act, values, prepared, columns, put(out));
                    }
                }
            }
        });
    }
}

/// Output widths of a linear op's products.
fn widths(linear: &Linear) -> impl Iterator<Item = usize> + '_ {
    let (members, glu) = match linear {
        Linear::Group(members) => (members.as_slice(), None),
        Linear::Glu { out, .. } => (&[][..], Some(out.width)),
    };
    members.iter().map(|m| m.out.width).chain(glu)
}

/// Column groups per piece, and pieces, of a linear op.
fn pieces(linear: &Linear, workers: usize) -> (usize, usize) {
    let total: usize = widths(linear).map(|w| w.div_ceil(linear::COLUMN_ALIGN)).sum();
    let each = total.div_ceil(PIECES_PER_WORKER * workers).max(1);
    (each, total.div_ceil(each))
}

/// The products and columns that column groups `groups`, counted through all products, stand for.
fn columns_of(linear: &Linear, groups: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let mut first = 0;
    widths(linear).enumerate().filter_map(move |(member, width)| {
        let count = width.div_ceil(linear::COLUMN_ALIGN);
        let start = groups.start.clamp(first, first + count) - first;
        let end = groups.end.clamp(first, first + count) - first;
        first += count;
        let columns = start * linear::COLUMN_ALIGN..(end * linear::COLUMN_ALIGN).min(width);
        (start < end).then_some((member, columns))
    })
}
