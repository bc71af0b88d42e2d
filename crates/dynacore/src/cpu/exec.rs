//! The CPU executor: checks a step, does its block copies, and lets all workers walk the plan's phases.
//!
//! A phase's work is cut into items that workers take one after another (see [`super::pool`]). Phases of a single item
//! that follow each other form one stage: one worker does them all without waiting in between, which at one token is
//! most of what is not a product or attention. Who computes an item never changes its result.

mod outputs;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dynair::verify::{self, Pools};
use dynair::{BatchMeta, Limits, Plan};

use outputs::OutputRows;

use super::Mode;
use super::cut::Cut;
use super::kernels::ops::OpTable;
use super::ops::attention::{Items, Layer, Many, Scratch};
use super::ops::experts::{self, ExpertPhase};
use super::ops::linear::{self, Form, Meets, Prepared};
use super::ops::rows::Rows;
use super::pool::shared::SharedMem;
use super::pool::{Job, Pool};
use super::program::{Linear, Phase, Program, Size, Val};
use super::storage::CpuKv;
use super::table::KernelTable;
use crate::buffer::Tensor;
use crate::device::{Executor, Logits, PhaseTime, TakeRow, Ticket};
use crate::error::{Error, Result};
use crate::kv::KvGeometry;

/// Pieces per worker that row-wise ops and the products of experts are cut into: enough that a worker whose core is
/// shared falls behind by little.
const PIECES_PER_WORKER: usize = 8;

/// A lock whose data stays meaningful when a holder panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A plan bound to weights, cache and the device's workers.
pub struct CpuExecutor {
    inner: Arc<Inner>,
    /// Memory for the parts of split attention; replaced when a step needs more.
    parts: Arc<SharedMem<f32>>,
    pool: Arc<Mutex<Pool>>,
    geometry: KvGeometry,
    next_ticket: u64,
    in_flight: Option<(u64, Size)>,
    poisoned: Option<String>,
}

/// What workers see of the executor.
struct Inner {
    table: &'static KernelTable,
    /// Whether the number of rows may choose the arithmetic of products and of attention.
    auto: bool,
    ops: &'static OpTable,
    program: Program,
    limits: Limits,
    kv: CpuKv,
    arena: SharedMem<f32>,
    /// Prepared activations of the product at hand.
    prepared: SharedMem<u8>,
    /// Where mixtures of experts sort and gather.
    experts: experts::Memory,
    /// Per rotation `[max_tokens][2 · pairs]`.
    angles: Vec<SharedMem<f32>>,
    scratch: Vec<Mutex<WorkerScratch>>,
}

struct WorkerScratch {
    attention: Scratch,
    turned: Vec<f32>,
}

/// A step: what its workers read.
struct Step {
    inner: Arc<Inner>,
    batch: BatchMeta,
    size: Size,
    stages: Vec<Stage>,
    /// Per cache group each row's block and slot.
    places: Vec<Vec<(u32, u32)>>,
    /// Per attention class.
    items: Vec<Items>,
    parts: Arc<SharedMem<f32>>,
    times: Option<Times>,
}

/// Phases between two waits.
#[derive(Debug, Clone, PartialEq)]
struct Stage {
    /// A run of phases of at most one item each, or one phase, or a norm and the preparation of what it gives: who
    /// has made rows prepares them too, while they are near.
    phases: Range<usize>,
    /// Items of the one phase, or of the preparation; 1 for a run.
    items: usize,
    /// Items taken together.
    batch: usize,
}

struct Times {
    start: Instant,
    /// By phase.
    work_ns: Vec<AtomicU64>,
    /// By stage, since the start.
    end_ns: Vec<AtomicU64>,
}

pub(super) fn out_of_memory(bytes: usize, what: &str) -> Error {
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
        (table, mode): (&'static KernelTable, Mode),
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
            let bytes = match phase {
                Phase::Prepare { x, meets } => prepared_bytes(table, x.bind(most), x.width, *meets),
                Phase::Experts(ExpertPhase::Gather { x, uses, .. }) => {
                    linear::scratch_bytes(table, Form::Records, x.cols).checked_mul(uses.slots(most))
                }
                _ => continue,
            };
            prepared = prepared.max(bytes.ok_or_else(|| out_of_memory(usize::MAX, "activations"))?);
        }
        let experts = program.phases.iter().filter_map(|(phase, _)| match phase {
            Phase::Experts(phase) => Some(phase),
            _ => None,
        });
        let experts = experts::Memory::new(experts, most)?;
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
                attention: Scratch::new(head_dim, geometry.block_tokens, table),
                turned: vec![0.0; row],
            })
        });
        let inner = Arc::new(Inner {
            table,
            auto: mode == Mode::Auto,
            ops,
            limits: plan.limits,
            arena: zeroed(program.arena, "intermediate values")?,
            prepared: SharedMem::zeroed(prepared).ok_or_else(|| out_of_memory(prepared, "activations"))?,
            experts,
            angles: angles.collect::<Result<_>>()?,
            scratch: scratch.collect(),
            program,
            kv,
        });
        let parts = Arc::new(zeroed(0, "attention")?);
        Ok(CpuExecutor {
            inner,
            parts,
            pool,
            geometry,
            next_ticket: 0,
            in_flight: None,
            poisoned: None,
        })
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

    fn step(&mut self, batch: &BatchMeta, timed: bool) -> Result<Arc<Step>> {
        if let Some(message) = &self.poisoned {
            return Err(Error::Worker {
                device: "cpu".into(),
                message: message.clone(),
            });
        }
        self.check(batch)?;
        let step = Arc::new(self.begin(batch, timed)?);
        step.forget_ledgers();
        self.copy_blocks(batch);
        step.forget_ledgers();
        self.walk(Arc::clone(&step) as Arc<dyn Job>)?;
        Ok(step)
    }

    /// Lets the workers walk a job. After a panic the memory is in no known state, and others may still be at work in it.
    fn walk(&mut self, job: Arc<dyn Job>) -> Result<()> {
        lock(&self.pool).run(job).map_err(|message| {
            self.poisoned = Some(message.clone());
            Error::Worker {
                device: "cpu".into(),
                message,
            }
        })
    }

    /// The size of the step in flight, which is none from now on.
    fn landed(&mut self, ticket: &Ticket) -> Result<Size> {
        match self.in_flight.take_if(|(number, _)| *number == ticket.0) {
            Some((_, size)) => Ok(size),
            None => Err(Error::Batch(format!(
                "ticket {} is of no step in flight",
                ticket.0
            ))),
        }
    }

    /// Derives what the workers need from the batch.
    fn begin(&mut self, batch: &BatchMeta, timed: bool) -> Result<Step> {
        let inner = &self.inner;
        let workers = inner.scratch.len();
        let wide = Many::of(inner.table).filter(|_| inner.auto);
        let items: Vec<Items> = inner
            .program
            .classes
            .iter()
            .map(|class| Items::new(class, batch, workers, wide))
            .collect();
        let parts = items.iter().map(|i| i.part_elements).max().unwrap_or(0);
        if parts > self.parts.len() {
            let memory = SharedMem::zeroed(parts).ok_or_else(|| out_of_memory(4 * parts, "attention"))?;
            self.parts = Arc::new(memory);
        }
        let mut step = Step {
            inner: Arc::clone(inner),
            batch: batch.clone(),
            size: Size {
                tokens: batch.tokens.len(),
                outputs: batch.output_rows.len(),
            },
            stages: Vec::new(),
            places: self.places(batch),
            items,
            parts: Arc::clone(&self.parts),
            times: None,
        };
        step.stages = step.make_stages();
        step.times = timed.then(|| Times {
            start: Instant::now(),
            work_ns: self
                .inner
                .program
                .phases
                .iter()
                .map(|_| AtomicU64::new(0))
                .collect(),
            end_ns: step.stages.iter().map(|_| AtomicU64::new(0)).collect(),
        });
        Ok(step)
    }

    /// Per cache group the block and slot of each row.
    fn places(&self, batch: &BatchMeta) -> Vec<Vec<(u32, u32)>> {
        let block_tokens = self.geometry.block_tokens;
        let of_table = |table: &dynair::BlockTables| {
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
        };
        batch.tables.iter().map(of_table).collect()
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
        let size = self.step(batch, false)?.size;
        self.next_ticket += 1;
        self.in_flight = Some((self.next_ticket, size));
        Ok(Ticket(self.next_ticket))
    }

    fn wait(&mut self, ticket: Ticket, logits: &mut Logits) -> Result<()> {
        let size = self.landed(&ticket)?;
        let from = self.inner.arena.read(self.inner.program.logits.range(size));
        logits.data.clear();
        logits.data.extend_from_slice(from);
        logits.vocab = self.inner.program.logits.width;
        Ok(())
    }

    fn wait_rows(&mut self, ticket: Ticket, take: &Arc<TakeRow>) -> Result<()> {
        let size = self.landed(&ticket)?;
        let count = self.inner.program.logits.bind(size);
        let rows = OutputRows::new(&self.inner, count, take);
        self.walk(Arc::new(rows))
    }

    fn profile(&mut self, batch: &BatchMeta) -> Result<Vec<PhaseTime>> {
        let step = self.step(batch, true)?;
        let times = step.times.as_ref().expect("the step was executed with times");
        let (mut all, mut before) = (Vec::new(), 0);
        for (stage, end) in step.stages.iter().zip(&times.end_ns) {
            let end = end.load(Relaxed);
            for i in stage.phases.clone() {
                let (phase, label) = &self.inner.program.phases[i];
                all.push(PhaseTime {
                    label: Arc::clone(label),
                    phase: phase.name(),
                    work_ns: times.work_ns[i].load(Relaxed),
                    wall_ns: if i + 1 == stage.phases.end {
                        end.saturating_sub(before)
                    } else {
                        0
                    },
                });
            }
            before = end;
        }
        Ok(all)
    }
}

impl Job for Step {
    fn stages(&self) -> usize {
        self.stages.len()
    }

    fn items(&self, stage: usize) -> usize {
        let stage = &self.stages[stage];
        stage.items.div_ceil(stage.batch)
    }

    fn run(&self, stage: usize, item: usize, worker: usize) {
        let stage = &self.stages[stage];
        let items = item * stage.batch..((item + 1) * stage.batch).min(stage.items);
        let mut scratch = lock(&self.inner.scratch[worker]);
        for i in stage.phases.clone() {
            let phase = &self.inner.program.phases[i].0;
            // A run may hold phases without items.
            if stage.phases.len() > 1 && self.load(phase) == 0 {
                continue;
            }
            let started = self.times.as_ref().map(|_| Instant::now());
            match self.joined(i) {
                Some((x, meets)) if stage.items > 1 => {
                    self.norm(phase, self.prepared_rows(x, meets, items.clone()));
                }
                _ => self.phase(phase, items.clone(), &mut scratch),
            }
            if let (Some(times), Some(started)) = (&self.times, started) {
                times.work_ns[i].fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
            }
        }
    }

    fn done(&self, stage: usize) {
        if let Some(times) = &self.times {
            times.end_ns[stage].store(times.start.elapsed().as_nanos() as u64, Relaxed);
        }
        self.forget_ledgers();
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
            Phase::Experts(phase) => phase.name(),
        }
    }
}

impl Step {
    /// Forgets the ledgers of shared memory; they exist in this crate's tests only.
    fn forget_ledgers(&self) {
        if cfg!(test) {
            self.inner.arena.new_phase();
            self.inner.prepared.new_phase();
            self.inner.experts.new_phase();
            self.inner.angles.iter().for_each(SharedMem::new_phase);
            self.inner.kv.caches.iter().for_each(|c| c.mem.new_phase());
            self.parts.new_phase();
        }
    }

    fn experts(&self) -> experts::Driver<'_> {
        let inner = &*self.inner;
        experts::Driver {
            table: inner.table,
            ops: inner.ops,
            arena: &inner.arena,
            prepared: &inner.prepared,
            memory: &inner.experts,
            size: self.size,
            pieces: PIECES_PER_WORKER * inner.scratch.len(),
            auto: inner.auto,
        }
    }

    fn rows(&self) -> Rows<'_> {
        let inner = &*self.inner;
        Rows {
            table: inner.ops,
            arena: &inner.arena,
            size: self.size,
            batch: &self.batch,
            angles: &inner.angles,
        }
    }

    fn make_stages(&self) -> Vec<Stage> {
        let workers = self.inner.scratch.len();
        let mut stages: Vec<Stage> = Vec::new();
        for (i, (phase, _)) in self.inner.program.phases.iter().enumerate() {
            if stages.last().is_some_and(|s| s.phases.contains(&i)) {
                continue;
            }
            let items = self.load(phase);
            let joined = self.joined(i);
            let items = joined.map_or(items, |(x, meets)| self.prepare_items(x, meets));
            let end = if joined.is_some() { i + 2 } else { i + 1 };
            let uneven = match phase {
                Phase::Attention { .. } | Phase::Product { .. } => true,
                Phase::Experts(phase) => phase.is_product(),
                _ => false,
            };
            let batch = if uneven {
                1
            } else {
                (items / (PIECES_PER_WORKER * workers)).max(1)
            };
            match stages.last_mut() {
                _ if items == 0 => {}
                Some(last) if last.items == 1 && items == 1 => last.phases.end = end,
                _ => stages.push(Stage {
                    phases: i..end,
                    items,
                    batch,
                }),
            }
        }
        stages
    }

    /// Items of a phase.
    fn load(&self, phase: &Phase) -> usize {
        let rows = self.rows();
        match phase {
            Phase::Angles => self.size.tokens,
            Phase::Embed { out, .. } | Phase::TakeOutputs { out, .. } => rows.row_items(out),
            Phase::Norm { x, .. } => rows.norm_items(x),
            Phase::AddNorm { a, .. } => rows.norm_items(a),
            Phase::Rope { x, .. } => rows.row_items(x),
            Phase::Map { x, .. } => rows.element_items(x),
            Phase::Zip { a, .. } => rows.element_items(a),
            Phase::KvWrite { k, .. } => rows.row_items(k),
            Phase::Attention { class, .. } => self.items[*class].count(),
            Phase::AttentionMerge { class, .. } => self.items[*class].merge_count(),
            Phase::Prepare { x, meets } => self.prepare_items(x, *meets),
            Phase::Product { x, .. } if x.bind(self.size) == 0 => 0,
            Phase::Product { x, meets, linear } => self.pieces(x, *meets, linear).count(),
            Phase::Experts(phase) => self.experts().items(phase),
        }
    }

    /// Runs some items of a phase.
    fn phase(&self, phase: &Phase, items: Range<usize>, own: &mut WorkerScratch) {
        let rows = self.rows();
        let program = &self.inner.program;
        let caches = &self.inner.kv.caches;
        match phase {
            Phase::Angles => rows.make_angles(&program.ropes, items),
            Phase::Embed { weight, out } => rows.embed(weight, out, items),
            Phase::Norm { x, .. } | Phase::AddNorm { a: x, .. } => self.norm(phase, rows.norm_rows(x, items)),
            Phase::Rope { x, style, table, out } => {
                rows.rope(x, *style, *table, program.ropes[*table].pairs(), out, items);
            }
            Phase::Map { op, x, out } => rows.map(*op, x, out, items),
            Phase::Zip { op, a, b, out } => rows.zip(*op, a, b, out, items),
            Phase::TakeOutputs { x, out } => rows.take_outputs(x, out, items),
            Phase::KvWrite { k, v, cache, rope } => {
                let cache = &caches[*cache];
                let turn = rope.map(|(style, table)| (style, table, program.ropes[table].pairs()));
                rows.kv_write(
                    cache,
                    k,
                    v,
                    turn,
                    &self.places[cache.group],
                    &mut own.turned,
                    items,
                );
            }
            Phase::Attention {
                q,
                cache,
                class,
                spec,
                out,
            } => {
                let layer = self.layer(*class, spec, out);
                items.for_each(|i| layer.attend(&caches[*cache], q.at, i, &mut own.attention));
            }
            Phase::AttentionMerge { class, spec, out } => {
                let layer = self.layer(*class, spec, out);
                items.for_each(|i| layer.merge_item(i, &mut own.attention));
            }
            Phase::Prepare { x, meets } => self.prepare(x, *meets, items),
            Phase::Product { x, meets, linear } => items.for_each(|i| self.product(x, *meets, linear, i)),
            Phase::Experts(phase) => self.experts().run(phase, items),
        }
    }

    fn layer<'a>(&'a self, class: usize, spec: &'a dynair::AttnSpec, out: &Val) -> Layer<'a> {
        Layer {
            table: self.inner.ops,
            spec,
            items: &self.items[class],
            batch: &self.batch,
            arena: &self.inner.arena,
            out: out.at,
            parts: &self.parts,
        }
    }

    /// What the next phase prepares, if that is what norm `phase` gives by whole rows, and more than one item.
    fn joined(&self, phase: usize) -> Option<(&Val, Meets)> {
        let phases = &self.inner.program.phases;
        match (&phases[phase].0, phases.get(phase + 1).map(|p| &p.0)) {
            (Phase::Norm { out, .. } | Phase::AddNorm { out, .. }, Some(Phase::Prepare { x, meets }))
                if out == x && x.cols == x.width && self.prepare_items(x, *meets) > 1 =>
            {
                Some((x, *meets))
            }
            _ => None,
        }
    }

    /// Some rows of a norm.
    fn norm(&self, phase: &Phase, which: Range<usize>) {
        let rows = self.rows();
        match phase {
            Phase::Norm { x, weight, eps, out } => rows.norm(x, weight, *eps, out, which),
            Phase::AddNorm {
                a,
                b,
                weight,
                eps,
                sum,
                out,
            } => rows.add_norm(a, b, weight, *eps, sum, out, which),
            _ => unreachable!("the caller has a norm"),
        }
    }

    /// Items of a preparation.
    fn prepare_items(&self, x: &Val, meets: Meets) -> usize {
        if linear::scratch_bytes(self.inner.table, Form::Records, x.width) == 0 {
            0
        } else if self.form(x, meets) == Form::Tiles {
            x.bind(self.size).div_ceil(linear::TILE_ROWS)
        } else {
            self.rows().row_items(x)
        }
    }

    /// The rows some items of a preparation hold.
    fn prepared_rows(&self, x: &Val, meets: Meets, items: Range<usize>) -> Range<usize> {
        let rows = x.bind(self.size);
        if self.form(x, meets) == Form::Tiles {
            (items.start * linear::TILE_ROWS).min(rows)..(items.end * linear::TILE_ROWS).min(rows)
        } else {
            super::ops::rows::rows_of(items, rows, x.width)
        }
    }

    fn prepare(&self, x: &Val, meets: Meets, items: Range<usize>) {
        let inner = &*self.inner;
        let form = self.form(x, meets);
        if form == Form::Tiles {
            let bytes = linear::tile_bytes(x.width);
            for tile in items {
                let first = tile * linear::TILE_ROWS;
                let rows = first..(first + linear::TILE_ROWS).min(x.bind(self.size));
                let out = inner.prepared.write(tile * bytes..(tile + 1) * bytes);
                linear::prepare_tiles(inner.table, inner.arena.read(x.row_range(rows)), x.width, out);
            }
            return;
        }
        let rows = self.prepared_rows(x, meets, items);
        let bytes = linear::scratch_bytes(inner.table, form, x.width);
        let out = inner.prepared.write(rows.start * bytes..rows.end * bytes);
        let values = inner.arena.read(x.row_range(rows));
        linear::prepare(inner.table, form, values, x.width, out);
    }

    /// What the products of x are made from.
    fn form(&self, x: &Val, meets: Meets) -> Form {
        if self.inner.auto {
            linear::form(self.inner.table, x.bind(self.size), x.width, meets)
        } else {
            Form::Records
        }
    }

    /// How the column groups of a linear op are cut. Tiles take them in pairs.
    fn pieces(&self, x: &Val, meets: Meets, linear: &Linear) -> Cut {
        let groups = widths(linear).map(|w| w.div_ceil(linear::COLUMN_ALIGN)).sum();
        Cut::new(
            groups,
            if self.form(x, meets) == Form::Tiles { 2 } else { 1 },
            self.inner.scratch.len(),
        )
    }

    /// Piece `piece` of the columns of a linear op.
    fn product(&self, x: &Val, meets: Meets, linear: &Linear, piece: usize) {
        let inner = &*self.inner;
        let values = inner.arena.read(x.range(self.size));
        let form = self.form(x, meets);
        let bytes = linear::form_bytes(inner.table, form, x.bind(self.size), x.width);
        let prepared = Prepared::of(form, inner.prepared.read(0..bytes));
        let put = |out: &Val| {
            let out = *out;
            move |row: usize, column: usize, values: &[f32]| {
                let at = out.at + row * out.width + column;
                let to = inner.arena.write(at..at + values.len());
                // Of a length the compiler knows, almost always.
                match (
                    to.first_chunk_mut(),
                    values.first_chunk::<{ linear::COLUMN_ALIGN }>(),
                ) {
                    (Some(to), Some(values)) => *to = *values,
                    _ => to.copy_from_slice(values),
                }
            }
        };
        let matrix = "lowering checked the weight's form";
        let groups = self.pieces(x, meets, linear).piece(piece);
        for (member, columns) in columns_of(linear, groups) {
            match linear {
                Linear::Group(members) => {
                    let m = &members[member];
                    let weight = m.weight.matrix.as_ref().expect(matrix);
                    let bias = m.bias.as_deref();
                    linear::run(inner.table, weight, bias, values, prepared, columns, put(&m.out));
                }
                Linear::Glu { gate, up, act, out } => {
                    let pair = [gate, up].map(|w| w.matrix.as_ref().expect(matrix));
                    linear::run_glu(inner.table, pair, *act, values, prepared, columns, put(out));
                }
            }
        }
    }
}

/// Bytes of `rows` prepared rows, whichever form they take.
fn prepared_bytes(table: &KernelTable, rows: usize, width: usize, meets: Meets) -> Option<usize> {
    // Short records are shorter.
    let records = linear::scratch_bytes(table, Form::Records, width).checked_mul(rows)?;
    if linear::form(table, rows, width, meets) != Form::Tiles {
        return Some(records);
    }
    let tiles = linear::tile_bytes(width).checked_mul(rows.div_ceil(linear::TILE_ROWS))?;
    Some(records.max(tiles))
}

/// Output widths of a linear op's products.
fn widths(linear: &Linear) -> impl Iterator<Item = usize> + '_ {
    let (members, glu) = match linear {
        Linear::Group(members) => (members.as_slice(), None),
        Linear::Glu { out, .. } => (&[][..], Some(out.width)),
    };
    members.iter().map(|m| m.out.width).chain(glu)
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
