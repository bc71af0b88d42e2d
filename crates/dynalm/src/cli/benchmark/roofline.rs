//! `benchmark --roofline`: what each op of the plan moves, computes and takes, beside what the machine can do.
//!
//! Bytes and operations are the plan's floors ([`dynair::plan::Cost`]): every operand touched once. Times are those of
//! the quickest of several steps. Ops of all layers with one name are summed.

use std::path::Path;
use std::time::Instant;

use dynacore::cpu::Mode;
use dynacore::cpu::isa::Isa;
use dynacore::cpu::ops::linear::{self, Form, Meets};
use dynacore::cpu::peak::Peak;
use dynacore::cpu::table::KernelTable;
use dynacore::cpu::whole_products;
use dynacore::{Device, PhaseTime};
use dynair::plan::{Cost, StepSize};
use dynair::{DType, FusedOp, Operand, Plan, Step, ValueType};
use serde_json::{Value, json};

use super::drive::Random;
use super::report::number;
use crate::cli::direct::{Direct, DirectOptions};
use crate::cli::{console, session, text};
use crate::load;
use crate::settings::Settings;

/// Steps of which the quickest counts, after one that does not.
const DECODE_STEPS: usize = 16;
const PREFILL_STEPS: usize = 4;

/// What is to be measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct RooflineOptions<'a> {
    /// Contexts at which a token is decoded.
    pub(super) contexts: &'a [usize],
    /// Lengths of prompts; what a step does not hold is left out.
    pub(super) prefill: &'a [usize],
    pub(super) seed: u64,
    pub(super) json: bool,
}

/// What the multiply-adds of an op are made of, and so which peak they are held against.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Arithmetic {
    #[default]
    F32,
    /// 16-bit integers: quantised weights.
    I16,
    /// Bytes: quantised weights and several rows.
    I8,
    /// Tiles of bf16: many rows.
    Bf16,
}

impl Arithmetic {
    fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::I16 => "i16",
            Arithmetic::I8 => "i8",
            Arithmetic::Bf16 => "bf16",
        }
    }

    /// What the machine does of it in a second.
    fn peak(self, peak: &Peak) -> f64 {
        match self {
            Arithmetic::F32 => None,
            Arithmetic::I16 => peak.i16_ops,
            Arithmetic::I8 => peak.i8_ops,
            Arithmetic::Bf16 => peak.bf16_ops,
        }
        .unwrap_or(peak.f32_flops)
    }
}

/// The kernels a step meets.
#[derive(Debug, Clone, Copy)]
struct Kernels {
    table: &'static KernelTable,
    mode: Mode,
    /// Whether quantised weights meet 16-bit integers.
    integer: bool,
}

impl Kernels {
    /// The arithmetic of a step of `plan` at `size`.
    fn arithmetic(&self, plan: &Plan, (step, whole): (&Step, bool), size: &StepSize) -> Arithmetic {
        let tensor = |o: &Operand| match plan.operand_type(o) {
            Some(ValueType::Tensor(t)) => Some(t),
            _ => None,
        };
        let is_product = matches!(
            step.op,
            dynair::Op::Linear | dynair::Op::Fused(FusedOp::LinearGroup { .. } | FusedOp::LinearGlu(_))
        );
        let weights = step.inputs.iter().filter(|o| matches!(o, Operand::Weight(_)));
        // Biases are f32, which takes part in no choice.
        let mut types = weights.filter_map(tensor).map(|t| t.dtype);
        let (Some(x), true) = (step.inputs.first().and_then(tensor), is_product) else {
            return Arithmetic::F32;
        };
        let rows = x.shape.rows().bind(size.tokens, size.outputs);
        let form = match self.mode {
            Mode::Auto => {
                let meets = Meets::of(whole, types.clone());
                linear::form(self.table, rows, x.shape.row_elements(), meets)
            }
            _ => Form::Records,
        };
        let quantised = self.integer && types.any(|t| matches!(t, DType::Quant(_)));
        match form {
            Form::Tiles => Arithmetic::Bf16,
            Form::Short if quantised => Arithmetic::I8,
            Form::Records if quantised => Arithmetic::I16,
            _ => Arithmetic::F32,
        }
    }
}

/// An op of all layers together.
#[derive(Debug, Clone, Default, PartialEq)]
struct Op {
    /// The steps' label without the layer's number.
    name: String,
    /// The op's name in the plan.
    kind: &'static str,
    steps: usize,
    cost: Cost,
    seconds: f64,
    /// What its multiply-adds are made of.
    arithmetic: Arithmetic,
}

/// `blk.3.attn_q` → `blk.*.attn_q`.
fn over_layers(label: &str) -> String {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    label
        .split('.')
        .map(|part| if number(part) { "*" } else { part })
        .collect::<Vec<_>>()
        .join(".")
}

/// The time of each phase: that of its stage, divided among the stage's phases by their work.
fn divide(phases: &[PhaseTime]) -> Vec<(&str, f64)> {
    let mut all = Vec::with_capacity(phases.len());
    let mut first = 0;
    for (i, phase) in phases.iter().enumerate() {
        // Only the last phase of a stage has its time.
        if phase.wall_ns == 0 && i + 1 < phases.len() {
            continue;
        }
        let stage = &phases[first..=i];
        let work: u64 = stage.iter().map(|p| p.work_ns).sum();
        for (k, p) in stage.iter().enumerate() {
            let share = match work {
                0 => f64::from(u8::from(k + 1 == stage.len())),
                _ => p.work_ns as f64 / work as f64,
            };
            all.push((&*p.label, share * phase.wall_ns as f64 * 1e-9));
        }
        first = i + 1;
    }
    all
}

/// The step of `plan` that each of `labels` (phases in the order they ran) is a part of; `None` for what belongs to none.
/// Steps may share a label, as the two uses of a tied embedding do, so the order decides.
fn steps_of<'a>(plan: &[&str], labels: impl Iterator<Item = &'a str>) -> Vec<Option<usize>> {
    let mut now = 0;
    labels
        .map(|label| {
            let found = plan.iter().skip(now).position(|step| *step == label)?;
            now += found;
            Some(now)
        })
        .collect()
}

/// Ops in the plan's order with what they cost, and the time of each.
fn ops(plan: &Plan, size: &StepSize, phases: &[PhaseTime], kernels: Kernels) -> Vec<Op> {
    let mut ops: Vec<Op> = Vec::new();
    let mut at_step = Vec::new();
    for (step, whole) in plan.steps.iter().zip(whole_products(plan)) {
        let (name, kind) = (over_layers(&step.label), step.op.name());
        let at = ops.iter().position(|op| op.name == name && op.kind == kind);
        let at = at.unwrap_or_else(|| {
            ops.push(Op {
                name,
                kind,
                ..Op::default()
            });
            ops.len() - 1
        });
        at_step.push(at);
        let op = &mut ops[at];
        op.steps += 1;
        op.cost = op.cost + step.cost(plan, size);
        op.arithmetic = kernels.arithmetic(plan, (step, whole), size);
    }
    let labels: Vec<&str> = plan.steps.iter().map(|s| &*s.label).collect();
    let times = divide(phases);
    let steps = steps_of(&labels, times.iter().map(|(label, _)| *label));
    for ((label, seconds), step) in times.into_iter().zip(steps) {
        match step {
            Some(step) => ops[at_step[step]].seconds += seconds,
            None => match ops.iter_mut().find(|op| op.name == label) {
                Some(op) => op.seconds += seconds,
                // What the device does for all steps together, as the angles of rotations.
                None => ops.push(Op {
                    name: label.to_owned(),
                    kind: "device",
                    seconds,
                    ..Op::default()
                }),
            },
        }
    }
    ops
}

/// The quickest of `steps` steps of `tokens` after `context` tokens.
fn quickest(
    model: &mut Direct,
    random: &mut Random,
    vocab: usize,
    context: usize,
    tokens: usize,
    steps: usize,
) -> anyhow::Result<(f64, Vec<PhaseTime>)> {
    let mut ids = |n: usize| (0..n).map(|_| random.below(vocab) as u32).collect::<Vec<_>>();
    let mut best = (f64::INFINITY, Vec::new());
    for step in 0..=steps {
        // Decoding goes on from step to step; a prompt begins anew.
        if step == 0 || tokens > 1 {
            model.reset(0);
            for chunk in ids(context).chunks(model.max_tokens()) {
                model.step(&[(0, chunk)], false)?;
            }
        }
        let next = ids(tokens);
        let start = Instant::now();
        let phases = model.profile(0, &next)?;
        let seconds = start.elapsed().as_secs_f64();
        if step > 0 && seconds < best.0 {
            best = (seconds, phases);
        }
    }
    Ok(best)
}

/// Measures and prints.
pub(super) fn run(
    name: &str,
    path: &Path,
    options: &RooflineOptions<'_>,
    settings: &Settings,
) -> anyhow::Result<()> {
    let loading = session::load_options(settings, 1, None)?;
    let longest = options.contexts.iter().max().map_or(0, |c| c + DECODE_STEPS + 1);
    let prefill: Vec<usize> = options
        .prefill
        .iter()
        .copied()
        .filter(|n| {
            let fits = *n <= loading.batch_tokens;
            if !fits {
                console::note(format_args!(
                    "prefill {n} is more than a step holds (--batch-tokens {}); left out of the roofline",
                    loading.batch_tokens
                ));
            }
            fits
        })
        .collect();
    let context = longest.max(prefill.iter().copied().max().unwrap_or(0));
    let device = session::device(settings)?;
    let info = device.info().clone();
    let checkpoint = load::open(path)?;
    let vocab = checkpoint.spec.vocab_size;
    let plan = load::plan(checkpoint.graph, &device, &loading)?;
    drop(device);
    let isa = Isa::detect(Some(&info.isa))?;
    let peak = Peak::measure(isa, info.units)?;
    let mut model = Direct::open(
        path,
        &DirectOptions {
            mode: session::mode(settings),
            threads: settings.integer("threads"),
            kv: loading.kv,
            seqs: 1,
            context,
            batch_tokens: loading.batch_tokens,
        },
    )?;
    header(name, &info, &peak, options.json)?;
    let mut random = Random::new(options.seed);
    let kernels = Kernels {
        table: KernelTable::of(isa)?,
        mode: session::mode(settings),
        integer: peak.i16_ops.is_some(),
    };
    let steps = options.contexts.iter().map(|c| (*c, 1, DECODE_STEPS));
    for (context, tokens, count) in steps.chain(prefill.iter().map(|n| (0, *n, PREFILL_STEPS))) {
        let (seconds, phases) = quickest(&mut model, &mut random, vocab, context, tokens, count)?;
        let size = StepSize {
            tokens,
            outputs: 1,
            // A prompt's rows see half of it on average.
            context_len: if tokens == 1 {
                context + 1
            } else {
                tokens.div_ceil(2)
            },
            kv_block: loading.kv.block(),
        };
        let table = Table {
            model: name,
            context,
            tokens,
            seconds,
            ops: ops(&plan, &size, &phases, kernels),
            peak: &peak,
        };
        text::out(&if options.json {
            format!("{}\n", table.json())
        } else {
            table.text()
        })?;
    }
    Ok(())
}

fn header(name: &str, info: &dynacore::DeviceInfo, peak: &Peak, as_json: bool) -> anyhow::Result<()> {
    let more = [
        ("16-bit integers", peak.i16_ops),
        ("bytes", peak.i8_ops),
        ("bf16 tiles", peak.bf16_ops),
    ];
    let more: String = more
        .into_iter()
        .filter_map(|(what, ops)| Some(format!(", {} Gop/s in {what}", number(ops? / 1e9))))
        .collect();
    let line = format!(
        "{name} on {} ({} × {}): streaming read {} GB/s, {} GFLOP/s in f32{more}",
        info.name,
        info.isa,
        info.units,
        number(peak.read_bytes / 1e9),
        number(peak.f32_flops / 1e9),
    );
    if as_json {
        let record = json!({
            "record": "peak", "version": env!("CARGO_PKG_VERSION"), "device": info.name, "isa": info.isa,
            "threads": info.units, "read_bytes_per_s": peak.read_bytes, "f32_flops_per_s": peak.f32_flops,
            "i16_ops_per_s": peak.i16_ops, "i8_ops_per_s": peak.i8_ops, "bf16_ops_per_s": peak.bf16_ops,
        });
        return text::out(&format!("{record}\n"));
    }
    text::out(&format!("{line}\n"))
}

/// One step's table.
struct Table<'a> {
    model: &'a str,
    context: usize,
    tokens: usize,
    /// Of the whole step.
    seconds: f64,
    ops: Vec<Op>,
    peak: &'a Peak,
}

/// Rates of an op: bytes and operations a second, and the shares of the machine's; `None` where nothing was timed.
struct Rates {
    bytes: f64,
    ops: f64,
    read_share: f64,
    peak_share: f64,
}

impl Table<'_> {
    fn rates(&self, op: &Op) -> Option<Rates> {
        if op.seconds <= 0.0 {
            return None;
        }
        let (bytes, ops) = (
            op.cost.bytes() as f64 / op.seconds,
            op.cost.flops as f64 / op.seconds,
        );
        Some(Rates {
            bytes,
            ops,
            read_share: bytes / self.peak.read_bytes,
            peak_share: ops / op.arithmetic.peak(self.peak),
        })
    }

    /// All ops, and the whole step.
    fn rows(&self) -> Vec<Op> {
        let mut total = Op {
            name: "whole step".to_owned(),
            seconds: self.seconds,
            // Of the op with the most.
            arithmetic: self
                .ops
                .iter()
                .max_by_key(|op| op.cost.flops)
                .map_or(Arithmetic::F32, |op| op.arithmetic),
            ..Op::default()
        };
        for op in &self.ops {
            total.steps += op.steps;
            total.cost = total.cost + op.cost;
        }
        self.ops.iter().cloned().chain([total]).collect()
    }

    fn title(&self) -> String {
        match self.tokens {
            1 => format!("decode at {}", self.context),
            n => format!("prefill {n}"),
        }
    }

    fn text(&self) -> String {
        let head = [
            "op", "kind", "×", "MB", "MFLOP", "µs", "time", "GB/s", "of read", "GFLOP/s", "of peak",
        ];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        for op in self.rows() {
            let rates = self.rates(&op);
            let cell = |of: &dyn Fn(&Rates) -> String| rates.as_ref().map_or_else(|| "-".to_owned(), of);
            rows.push(vec![
                op.name.clone(),
                op.kind.to_owned(),
                op.steps.to_string(),
                number(op.cost.bytes() as f64 / 1e6),
                number(op.cost.flops as f64 / 1e6),
                number(op.seconds * 1e6),
                percent(op.seconds / self.seconds),
                cell(&|r| number(r.bytes / 1e9)),
                cell(&|r| percent(r.read_share)),
                cell(&|r| number(r.ops / 1e9)),
                cell(&|r| percent(r.peak_share)),
            ]);
        }
        format!(
            "\n{}: {} ms, {} tokens/s\n{}",
            self.title(),
            number(self.seconds * 1e3),
            number(self.tokens as f64 / self.seconds),
            console::table(&rows)
        )
    }

    fn json(&self) -> Value {
        let ops: Vec<Value> = self
            .rows()
            .into_iter()
            .map(|op| {
                let rates = self.rates(&op);
                json!({
                    "op": op.name, "kind": op.kind, "steps": op.steps, "weight_bytes": op.cost.weight_bytes,
                    "activation_bytes": op.cost.activation_bytes, "cache_bytes": op.cost.cache_bytes,
                    "flops": op.cost.flops, "arithmetic": op.arithmetic.name(), "seconds": op.seconds,
                    "read_share": rates.as_ref().map(|r| r.read_share),
                    "peak_share": rates.as_ref().map(|r| r.peak_share),
                })
            })
            .collect();
        json!({
            "record": "roofline", "model": self.model, "context": self.context, "tokens": self.tokens,
            "seconds": self.seconds, "ops": ops,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(label: &str, work_ns: u64, wall_ns: u64) -> PhaseTime {
        PhaseTime {
            label: label.into(),
            phase: "norm",
            work_ns,
            wall_ns,
        }
    }

    #[test]
    fn layers_are_summed_and_names_kept() {
        assert_eq!(over_layers("blk.12.attn_q"), "blk.*.attn_q");
        assert_eq!(over_layers("output"), "output");
        assert_eq!(over_layers("blk.1.ffn2.3x"), "blk.*.ffn2.3x");
    }

    #[test]
    fn equal_labels_are_told_apart_by_their_order() {
        let plan = ["embd", "norm", "q", "embd"];
        let phases = ["angles", "embd", "norm", "norm", "embd", "embd"];
        let expected = [None, Some(0), Some(1), Some(1), Some(3), Some(3)];
        assert_eq!(steps_of(&plan, phases.into_iter()), expected);
    }

    #[test]
    fn a_stages_time_is_divided_by_work_and_nothing_is_lost() {
        let phases = [
            phase("a", 100, 0),
            phase("b", 300, 1000),
            phase("c", 50, 200),
            phase("d", 0, 0),
        ];
        let found = divide(&phases);
        let expected = [("a", 250e-9), ("b", 750e-9), ("c", 200e-9), ("d", 0.0)];
        assert_eq!(found.len(), expected.len());
        for ((label, seconds), (name, value)) in found.into_iter().zip(expected) {
            assert!(
                label == name && (seconds - value).abs() < 1e-15,
                "{label}: {seconds}"
            );
        }
        assert_eq!(divide(&[phase("a", 0, 10)]), [("a", 10.0 * 1e-9)]);
    }
}
