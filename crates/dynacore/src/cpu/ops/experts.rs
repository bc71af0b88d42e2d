//! Mixture of experts: routing, and products of each expert's matrices with the rows that use it.
//!
//! Each row of a step uses U experts. A *slot* is one such use: slot `row * U + rank`, rank being the place of the expert
//! in the row's own list. The phases, each of which needs the one before to be done:
//!
//! 1. *route*: a row's logits to its experts' numbers and weights;
//! 2. *group*: slots sorted by expert, so that an expert's are neighbours (a counting sort; one worker);
//! 3. *gather*: rows copied and prepared in that order;
//! 4. *product*: each expert that is used at all meets its rows, its weight being read once. The work is cut into pieces
//!    of about equal cost across experts and columns alike, so that one row with eight experts keeps all workers busy
//!    as well as a prefill does;
//! 5. *combine* (after the down projection): a row's products, weighted and added by rank.
//!
//! A row's result depends on its own slots alone: products do (see [`super::linear`]), and their sum runs by rank,
//! whichever other rows an expert had in the step. But in `auto` mode the number of an expert's rows chooses the form of
//! its products.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use dynair::{Activation, Dim, ExpertWeights, RouterSpec};

use super::linear::{self, Form, Meets, Prepared};
use super::rows::{items, rows_of};
use crate::cpu::exec::out_of_memory;
use crate::cpu::kernels::ops::OpTable;
use crate::cpu::pack::PackedLinear;
use crate::cpu::pool::shared::SharedMem;
use crate::cpu::program::{Size, Val};
use crate::cpu::storage::CpuWeight;
use crate::cpu::table::KernelTable;
use crate::error::Result;

/// What reading sixteen columns of a weight costs, in rows multiplied with them: pieces are cut by this. It moves work
/// between workers and changes no result.
const READ_ROWS: usize = 4;

/// From this many rows of an expert on, tiles are used: a full one, since each piece prepares its rows anew. The number is
/// reasoned; what was measured is a prefill, with 128 rows an expert.
const TILES_FROM: usize = 16;

thread_local! {
    /// Rows of an expert, as tiles.
    static TILES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Which experts a step's rows use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Uses {
    /// Experts E.
    pub(crate) experts: usize,
    /// Experts used per row U.
    pub(crate) used: usize,
    /// The rows.
    pub(crate) rows: Dim,
    /// What they meet.
    pub(crate) meets: Meets,
}

impl Uses {
    /// Slots of a step.
    pub(crate) fn slots(&self, size: Size) -> usize {
        self.rows.bind(size.tokens, size.outputs) * self.used
    }
}

/// See the module's docs. Ids stand in the arena as bit patterns.
pub(crate) enum ExpertPhase {
    Route {
        logits: Val,
        spec: RouterSpec,
        ids: Val,
        weights: Val,
    },
    Group {
        ids: Val,
        experts: usize,
    },
    /// Rows of `x.cols` elements, of which `each` neighbouring slots share one.
    Gather {
        x: Val,
        uses: Uses,
        each: usize,
    },
    Glu {
        weights: [Arc<CpuWeight>; 2],
        act: Activation,
        uses: Uses,
        out: Val,
    },
    Down {
        down: Arc<CpuWeight>,
        uses: Uses,
        hidden: usize,
    },
    Combine {
        uses: Uses,
        weights: Val,
        out: Val,
    },
}

impl ExpertPhase {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            ExpertPhase::Route { .. } => "route",
            ExpertPhase::Group { .. } => "expert_group",
            ExpertPhase::Gather { .. } => "expert_gather",
            ExpertPhase::Glu { .. } => "expert_glu",
            ExpertPhase::Down { .. } => "expert_down",
            ExpertPhase::Combine { .. } => "expert_combine",
        }
    }

    /// Whether its items are pieces of products, which workers take one by one.
    pub(crate) fn is_product(&self) -> bool {
        matches!(self, ExpertPhase::Glu { .. } | ExpertPhase::Down { .. })
    }
}

/// What the phases hand to each other besides values of the plan.
pub(crate) struct Memory {
    /// Where each expert's slots begin in `order`, and the end.
    starts: SharedMem<u32>,
    /// Slots by expert.
    order: SharedMem<u32>,
    /// Rows in that order.
    gathered: SharedMem<f32>,
    /// Down projections, by slot.
    products: SharedMem<f32>,
}

impl Memory {
    /// Room for all these phases in a step of size `most`.
    ///
    /// # Errors
    /// If memory is short.
    pub(crate) fn new<'a>(phases: impl Iterator<Item = &'a ExpertPhase>, most: Size) -> Result<Memory> {
        let (mut experts, mut slots, mut gathered, mut products) = (0, 0, 0usize, 0usize);
        let elements = |uses: &Uses, width: usize| {
            let n = uses.slots(most).checked_mul(width);
            n.ok_or_else(|| out_of_memory(usize::MAX, "rows by expert"))
        };
        for phase in phases {
            match phase {
                ExpertPhase::Group { ids, experts: e } => {
                    experts = experts.max(*e);
                    slots = slots.max(ids.bind(most) * ids.width);
                }
                ExpertPhase::Gather { x, uses, .. } => gathered = gathered.max(elements(uses, x.cols)?),
                ExpertPhase::Down { uses, hidden, .. } => products = products.max(elements(uses, *hidden)?),
                _ => {}
            }
        }
        let short = |len: usize| move || out_of_memory(len.saturating_mul(4), "rows by expert");
        Ok(Memory {
            starts: SharedMem::zeroed(experts + 1).ok_or_else(short(experts))?,
            order: SharedMem::zeroed(slots).ok_or_else(short(slots))?,
            gathered: SharedMem::zeroed(gathered).ok_or_else(short(gathered))?,
            products: SharedMem::zeroed(products).ok_or_else(short(products))?,
        })
    }

    /// Forgets the ledgers.
    pub(crate) fn new_phase(&self) {
        self.starts.new_phase();
        self.order.new_phase();
        self.gathered.new_phase();
        self.products.new_phase();
    }
}

/// Runs the phases of a step.
pub(crate) struct Driver<'a> {
    pub(crate) table: &'static KernelTable,
    pub(crate) ops: &'static OpTable,
    pub(crate) arena: &'a SharedMem<f32>,
    pub(crate) prepared: &'a SharedMem<u8>,
    pub(crate) memory: &'a Memory,
    pub(crate) size: Size,
    /// Pieces a product is cut into.
    pub(crate) pieces: usize,
    /// Whether the number of an expert's rows may choose the form of its products.
    pub(crate) auto: bool,
}

impl Driver<'_> {
    /// Items of a phase. Which experts the rows use is not known when this is asked, so that pieces of a product may
    /// turn out empty.
    pub(crate) fn items(&self, phase: &ExpertPhase) -> usize {
        match phase {
            ExpertPhase::Route { logits, spec, .. } => {
                items(logits.bind(self.size), logits.width * spec.experts_used)
            }
            ExpertPhase::Group { ids, .. } => ids.bind(self.size).min(1),
            ExpertPhase::Gather { x, uses, .. } => items(uses.slots(self.size), x.cols),
            ExpertPhase::Glu { uses, out, .. } => self.product_items(uses, out.cols),
            ExpertPhase::Down { uses, hidden, .. } => self.product_items(uses, *hidden),
            ExpertPhase::Combine { uses, out, .. } => items(out.bind(self.size), out.width * uses.used),
        }
    }

    fn product_items(&self, uses: &Uses, rows: usize) -> usize {
        let most = uses.experts.min(uses.slots(self.size)) * (rows / linear::COLUMN_ALIGN + 2);
        self.pieces.min(most)
    }

    /// Runs some items of a phase.
    pub(crate) fn run(&self, phase: &ExpertPhase, items: Range<usize>) {
        match phase {
            ExpertPhase::Route {
                logits,
                spec,
                ids,
                weights,
            } => self.route(logits, spec, ids, weights, items),
            ExpertPhase::Group { ids, experts } => self.group(ids, *experts),
            ExpertPhase::Gather { x, uses, each } => self.gather(x, uses, *each, items),
            ExpertPhase::Glu {
                weights,
                act,
                uses,
                out,
            } => {
                for (piece, n) in items.map(|i| (i, self.items(phase))) {
                    self.glu(weights, *act, uses, out, piece, n);
                }
            }
            ExpertPhase::Down { down, uses, hidden } => {
                for (piece, n) in items.map(|i| (i, self.items(phase))) {
                    self.down(down, uses, *hidden, piece, n);
                }
            }
            ExpertPhase::Combine { uses, weights, out } => self.combine(uses, weights, out, items),
        }
    }

    fn route(&self, logits: &Val, spec: &RouterSpec, ids: &Val, weights: &Val, items: Range<usize>) {
        let rows = rows_of(items, logits.bind(self.size), logits.width * spec.experts_used);
        let out = self.arena.write(ids.row_range(rows.clone()));
        let shares = self.arena.write(weights.row_range(rows.clone()));
        let used = spec.experts_used;
        for ((logits, ids), weights) in self
            .arena
            .read(logits.row_range(rows))
            .chunks_exact(spec.experts)
            .zip(out.chunks_exact_mut(used))
            .zip(shares.chunks_exact_mut(used))
        {
            route(spec, logits, ids, weights);
        }
    }

    fn group(&self, ids: &Val, experts: usize) {
        let ids = self.arena.read(ids.range(self.size));
        let starts = self.memory.starts.write(0..experts + 1);
        let order = self.memory.order.write(0..ids.len());
        starts.fill(0);
        for id in ids {
            starts[id.to_bits() as usize + 1] += 1;
        }
        for e in 0..experts {
            starts[e + 1] += starts[e];
        }
        // Each start moves on as slots are placed, until it is where the next expert began.
        for (slot, id) in ids.iter().enumerate() {
            let start = &mut starts[id.to_bits() as usize];
            order[*start as usize] = slot as u32;
            *start += 1;
        }
        starts.copy_within(0..experts, 1);
        starts[0] = 0;
    }

    fn gather(&self, x: &Val, uses: &Uses, each: usize, items: Range<usize>) {
        let (slots, width) = (uses.slots(self.size), x.cols);
        let places = rows_of(items, slots, width);
        let order = self.memory.order.read(places.clone());
        let rows = self
            .memory
            .gathered
            .write(places.start * width..places.end * width);
        for (slot, row) in order.iter().zip(rows.chunks_exact_mut(width)) {
            let from = x.at + *slot as usize / each * width;
            row.copy_from_slice(self.arena.read(from..from + width));
        }
        for own in self.memory.starts.read(0..uses.experts + 1).windows(2) {
            let own = own[0] as usize..own[1] as usize;
            let [start, end] = [own.start, own.end].map(|p| p.clamp(places.start, places.end));
            let form = self.form(own.len(), width, uses.meets);
            // Tiles are made in the product.
            if start < end && form != Form::Tiles {
                let x = &rows[(start - places.start) * width..(end - places.start) * width];
                let out = self.prepared_range(&own, form, width, start..end);
                linear::prepare(self.table, form, x, width, self.prepared.write(out));
            }
        }
    }

    /// Where rows `rows` of an expert whose rows are `own` stand prepared, in a form that stands row by row: each expert's
    /// begin where the longest form would have them.
    fn prepared_range(
        &self,
        own: &Range<usize>,
        form: Form,
        width: usize,
        rows: Range<usize>,
    ) -> Range<usize> {
        let first = own.start * linear::scratch_bytes(self.table, Form::Records, width);
        let bytes = linear::scratch_bytes(self.table, form, width);
        first + (rows.start - own.start) * bytes..first + (rows.end - own.start) * bytes
    }

    /// What the products of an expert with so many rows are made from.
    fn form(&self, rows: usize, width: usize, meets: Meets) -> Form {
        if !self.auto {
            return Form::Records;
        }
        match linear::form(self.table, rows, width, meets) {
            Form::Tiles if rows < TILES_FROM => linear::row_form(self.table, rows, width, meets),
            form => form,
        }
    }

    /// Calls `product(expert, its rows, columns of the stacked weight, slots)` for each share of piece `piece` of
    /// `pieces`.
    fn shares(
        &self,
        uses: &Uses,
        (rows, width): (usize, usize),
        (piece, pieces): (usize, usize),
        mut product: impl FnMut(Share<'_>),
    ) {
        let starts = self.memory.starts.read(0..uses.experts + 1);
        let order = self.memory.order.read(0..uses.slots(self.size));
        for (expert, columns) in shares(starts, rows, piece, pieces) {
            let own = starts[expert] as usize..starts[expert + 1] as usize;
            let x = self.memory.gathered.read(own.start * width..own.end * width);
            let mut tiles = Vec::new();
            let prepared = match self.form(own.len(), width, uses.meets) {
                Form::Tiles => {
                    tiles = TILES.take();
                    self.prepare_tiles(x, width, &mut tiles)
                }
                form => {
                    let range = self.prepared_range(&own, form, width, own.clone());
                    Prepared::of(form, self.prepared.read(range))
                }
            };
            product(Share {
                x,
                prepared,
                slots: &order[own],
                columns,
                own: expert * rows..(expert + 1) * rows,
            });
            if !tiles.is_empty() {
                TILES.set(tiles);
            }
        }
    }

    fn prepare_tiles<'t>(&self, x: &[f32], width: usize, tiles: &'t mut Vec<u8>) -> Prepared<'t> {
        const LINE: usize = 64;
        let needed = linear::form_bytes(self.table, Form::Tiles, x.len() / width, width);
        if tiles.len() < needed + LINE {
            tiles.resize(needed + LINE, 0);
        }
        let start = tiles.as_ptr().align_offset(LINE).min(LINE);
        let tiles = &mut tiles[start..start + needed];
        linear::prepare_all(self.table, Form::Tiles, x, width, tiles);
        Prepared::Tiles(tiles)
    }

    fn glu(
        &self,
        weights: &[Arc<CpuWeight>; 2],
        act: Activation,
        uses: &Uses,
        out: &Val,
        piece: usize,
        n: usize,
    ) {
        let pair = [matrix(&weights[0]), matrix(&weights[1])];
        self.shares(uses, (out.cols, pair[0].cols()), (piece, n), |share| {
            let put = |row: usize, column: usize, values: &[f32]| {
                let (at, values) = share.clip(row, column, values);
                let at = out.at + at;
                self.arena.write(at..at + values.len()).copy_from_slice(values);
            };
            let columns = share.columns.clone();
            linear::run_glu(self.table, pair, act, share.x, share.prepared, columns, put);
        });
    }

    fn down(&self, down: &CpuWeight, uses: &Uses, hidden: usize, piece: usize, n: usize) {
        let down = matrix(down);
        self.shares(uses, (hidden, down.cols()), (piece, n), |share| {
            let put = |row: usize, column: usize, values: &[f32]| {
                let (at, values) = share.clip(row, column, values);
                let out = self.memory.products.write(at..at + values.len());
                out.copy_from_slice(values);
            };
            let columns = share.columns.clone();
            linear::run(self.table, down, None, share.x, share.prepared, columns, put);
        });
    }

    fn combine(&self, uses: &Uses, weights: &Val, out: &Val, items: Range<usize>) {
        let (used, width) = (uses.used, out.width);
        for row in rows_of(items, out.bind(self.size), width * used) {
            let weights = self.arena.read(weights.row_range(row..row + 1));
            let products = self
                .memory
                .products
                .read(row * used * width..(row + 1) * used * width);
            let y = self.arena.write(out.row_range(row..row + 1));
            let (first, rest) = products.split_at(width);
            self.ops.scale(weights[0], first, y);
            for (weight, product) in weights[1..].iter().zip(rest.chunks_exact(width)) {
                self.ops.blend(1.0, *weight, product, y);
            }
        }
    }
}

/// A share of a product: some columns of an expert with all its rows.
struct Share<'a> {
    x: &'a [f32],
    prepared: Prepared<'a>,
    /// Slot of each row.
    slots: &'a [u32],
    /// Columns of the stacked weight, whole groups.
    columns: Range<usize>,
    /// Those that are the expert's own: of matrices whose rows are no whole groups, neighbours share one.
    own: Range<usize>,
}

impl Share<'_> {
    /// Of `values` for row `row` from column `column` of the stacked weight on, those that are the expert's, and where
    /// in `[slots, rows of a matrix]` they belong.
    fn clip<'v>(&self, row: usize, column: usize, values: &'v [f32]) -> (usize, &'v [f32]) {
        let start = column.clamp(self.own.start, self.own.end);
        let end = (column + values.len()).clamp(self.own.start, self.own.end);
        let at = self.slots[row] as usize * self.own.len() + start - self.own.start;
        (at, &values[start - column..end - column])
    }
}

fn matrix(weight: &CpuWeight) -> &PackedLinear {
    weight
        .matrix
        .as_ref()
        .expect("lowering checked the weight's form")
}

/// What piece `piece` of `pieces` has to do: experts, and columns of the stacked weight (`rows` per expert) in whole
/// groups. All pieces together have every group of every expert that has slots once.
fn shares(
    starts: &[u32],
    rows: usize,
    piece: usize,
    pieces: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    const ALIGN: usize = linear::COLUMN_ALIGN;
    let total = (starts.len() - 1) * rows;
    let used = move || {
        starts
            .windows(2)
            .enumerate()
            .filter(|(_, w)| w[1] > w[0])
            .map(move |(expert, w)| {
                let groups = expert * rows / ALIGN..((expert + 1) * rows).div_ceil(ALIGN);
                (expert, groups, (w[1] - w[0]) as usize + READ_ROWS)
            })
    };
    let cost: usize = used().map(|(_, groups, each)| groups.len() * each).sum();
    let (from, to) = (cost * piece / pieces, cost * (piece + 1) / pieces);
    let mut before = 0;
    used().filter_map(move |(expert, groups, each)| {
        // Groups whose cost begins in this piece.
        let begun = |cost: usize| cost.saturating_sub(before).div_ceil(each).min(groups.len());
        let own = groups.start + begun(from)..groups.start + begun(to);
        before += groups.len() * each;
        let columns = own.start * ALIGN..(own.end * ALIGN).min(total);
        (!own.is_empty()).then_some((expert, columns))
    })
}

/// The experts a row uses, as bit patterns, and their weights. In f64, rounded once.
fn route(spec: &RouterSpec, logits: &[f32], ids: &mut [f32], weights: &mut [f32]) {
    // The largest so far stand in `weights`; NaN counts as the least.
    let mut have = 0;
    for (expert, logit) in logits.iter().enumerate() {
        let value = if logit.is_nan() { f32::NEG_INFINITY } else { *logit };
        let mut at = have;
        while at > 0 && value > weights[at - 1] {
            at -= 1;
        }
        if at == spec.experts_used {
            continue;
        }
        have = (have + 1).min(spec.experts_used);
        weights.copy_within(at..have - 1, at + 1);
        ids.copy_within(at..have - 1, at + 1);
        weights[at] = value;
        ids[at] = f32::from_bits(expert as u32);
    }
    let logit = |id: &f32| f64::from(logits[id.to_bits() as usize]);
    let most = logit(&ids[0]);
    let sum: f64 = match spec.weights {
        ExpertWeights::SoftmaxUsed => ids.iter().map(|id| (logit(id) - most).exp()).sum(),
        ExpertWeights::SoftmaxAll => logits.iter().map(|l| (f64::from(*l) - most).exp()).sum(),
    };
    for (id, weight) in ids.iter().zip(weights) {
        *weight = ((logit(id) - most).exp() / sum) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::self_test::cases::Rng;

    #[test]
    fn pieces_cover_every_used_expert_once_and_no_other() {
        let mut rng = Rng::new(11);
        for round in 0..300 {
            let (experts, rows) = (1 + rng.below(9), 1 + rng.below(70));
            let mut starts = vec![0u32];
            for _ in 0..experts {
                let slots = if rng.below(2) == 0 { 0 } else { rng.below(40) };
                starts.push(starts.last().expect("a first start") + slots as u32);
            }
            let pieces = 1 + rng.below(30);
            let mut seen = vec![0; experts * rows];
            for piece in 0..pieces {
                for (expert, columns) in shares(&starts, rows, piece, pieces) {
                    assert!(
                        starts[expert + 1] > starts[expert],
                        "round {round}: expert {expert} has no rows"
                    );
                    assert!(columns.start.is_multiple_of(16) && columns.end <= experts * rows);
                    let own = expert * rows..(expert + 1) * rows;
                    columns.filter(|c| own.contains(c)).for_each(|c| seen[c] += 1);
                }
            }
            for (column, times) in seen.into_iter().enumerate() {
                let used = starts[column / rows + 1] > starts[column / rows];
                assert_eq!(times, usize::from(used), "round {round}: column {column}");
            }
        }
    }

    #[test]
    fn one_row_of_many_experts_is_cut_evenly() {
        // Eight of 32 experts with a row each, 512 columns: 256 groups for 16 workers of 8 pieces.
        let starts: Vec<u32> = (0..=32).map(|e| e / 4).collect();
        for piece in 0..128 {
            let groups: usize = shares(&starts, 512, piece, 128).map(|(_, c)| c.len() / 16).sum();
            assert_eq!(groups, 2, "piece {piece}");
        }
    }

    #[test]
    fn routing_sorts_and_breaks_ties_by_number() {
        let spec = |experts_used, weights| RouterSpec {
            experts: 5,
            experts_used,
            weights,
        };
        let run = |spec: RouterSpec, logits: &[f32]| {
            let (mut ids, mut weights) = (vec![9.0; spec.experts_used], vec![9.0; spec.experts_used]);
            route(&spec, logits, &mut ids, &mut weights);
            (ids.iter().map(|i| i.to_bits()).collect::<Vec<_>>(), weights)
        };
        let used = ExpertWeights::SoftmaxUsed;
        assert_eq!(run(spec(3, used), &[1.0, 5.0, 5.0, 7.0, 1.0]).0, [3, 1, 2]);
        assert_eq!(
            run(spec(5, used), &[1.0, 5.0, f32::NAN, 7.0, 1.0]).0,
            [3, 1, 0, 4, 2]
        );
        assert_eq!(
            run(spec(1, used), &[1e30, -1e30, 0.0, 0.0, 0.0]),
            (vec![0], vec![1.0])
        );
        let (_, weights) = run(spec(2, ExpertWeights::SoftmaxAll), &[0.0; 5]);
        assert_eq!(weights, [0.2, 0.2]);
    }
}
