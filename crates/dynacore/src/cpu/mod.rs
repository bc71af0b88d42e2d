//! The CPU device.
//!
//! [`CpuDevice`] owns the kernel table it uses and a pool of worker threads shared by all its executors; weights are
//! packed for the table when loaded, caches are plain memory. [`exec`] walks plans, [`program`] lowers them, [`ops`]
//! are the drivers of the ops and [`kernels`] the leaves.

pub(crate) mod cut;
pub(crate) mod exec;
pub mod isa;
pub(crate) mod kernels;
pub mod ops;
pub mod pack;
pub mod peak;
pub mod pool;
pub(crate) mod program;
pub(crate) mod slab;
pub(crate) mod storage;
pub mod table;
pub mod topology;

use std::sync::{Arc, Mutex};

use dynair::{CacheDecl, DType, FusedOp, Op, Operand, Plan, Step, Target, ValueType, WeightDecl};

pub use exec::CpuExecutor;
pub use topology::{Topology, forget_peak_resident, peak_resident_bytes};

use crate::buffer::{Layout, Tensor, WeightBytes};
use crate::device::{Device, DeviceInfo, Executor, StepNote, WeightUsage};
use crate::error::{Error, Result};
use crate::kv::{KvGeometry, KvStorage};
use crate::self_test::SelfTestResult;
use isa::Isa;
use ops::linear::Form;
use pool::Pool;
pub use program::whole_products;
use storage::CpuKv;
use table::KernelTable;

/// Most worker threads of a device.
pub const MAX_THREADS: usize = 1024;

/// Alignment of values in the arena, bytes: a cache line, and the widest vector.
const ALIGNMENT: usize = 64;

/// Which kernels a device may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The fastest for the step at hand, within the precision the project promises: products of several rows are made
    /// from activations of 8 bits, or of many rows from tiles, where the table has kernels for them; many rows' attention is
    /// made from tiles, or sums in another order than few's.
    #[default]
    Auto,
    /// Results independent of batch, chunking and threads, bit for bit, and the same under every SIMD table.
    Exact,
    /// Portable kernels in f32.
    Safe,
}

/// Options of a [`CpuDevice`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Worker threads; `None`: [`Topology::auto_threads`].
    pub threads: Option<usize>,
    /// Which kernels.
    pub mode: Mode,
    /// The instruction set to use, by name; `None`: what [`isa::ISA_VARIABLE`] says, or else the best. In
    /// [`Mode::Safe`] it is `portable` whatever stands here.
    pub isa: Option<String>,
}

/// The CPU as a device.
pub struct CpuDevice {
    info: DeviceInfo,
    table: &'static KernelTable,
    mode: Mode,
    pool: Arc<Mutex<Pool>>,
    slabs: slab::Slabs,
}

impl std::fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuDevice({:?})", self.info)
    }
}

impl CpuDevice {
    /// Detects the CPU and starts the workers.
    ///
    /// # Errors
    /// [`Error::Option`] for a thread count of 0 or above [`MAX_THREADS`] or an instruction set this CPU lacks;
    /// [`Error::OutOfMemory`] if the system refuses a thread.
    pub fn new(options: &CpuOptions) -> Result<CpuDevice> {
        let chosen = match &options.isa {
            Some(name) => Isa::detect(Some(name))?,
            None => Isa::from_env()?,
        };
        let isa = if options.mode == Mode::Safe {
            Isa::Portable
        } else {
            chosen
        };
        let topology = Topology::detect();
        let threads = options.threads.unwrap_or_else(|| topology.auto_threads());
        if threads == 0 || threads > MAX_THREADS {
            return Err(Error::Option {
                name: "threads".into(),
                found: threads.to_string(),
                expected: format!("1 to {MAX_THREADS}"),
            });
        }
        let pool = Pool::new(threads).map_err(|e| Error::OutOfMemory {
            device: "cpu".into(),
            bytes: 0,
            what: format!("{threads} worker threads ({e})"),
        })?;
        let info = DeviceInfo {
            kind: "cpu",
            name: topology.model_name.clone(),
            isa: isa.name().into(),
            units: threads,
            total_bytes: topology.total_bytes(),
        };
        Ok(CpuDevice {
            info,
            table: KernelTable::of(isa)?,
            mode: options.mode,
            pool: Arc::new(Mutex::new(pool)),
            slabs: slab::Slabs::default(),
        })
    }

    /// As [`Device::compile`], with the executor's own type.
    ///
    /// # Errors
    /// As [`Device::compile`].
    pub fn compile_cpu(&self, plan: &Plan, weights: &[Tensor], kv: KvStorage) -> Result<CpuExecutor> {
        let foreign = || Error::Unsupported {
            device: "cpu".into(),
            what: "a cache of another device".into(),
        };
        let KvStorage { geometry, data, .. } = kv;
        let data = data.downcast::<CpuKv>().map_err(|_| foreign())?;
        let fits = plan.caches.len() == data.caches.len()
            && plan
                .caches
                .iter()
                .zip(&data.caches)
                .all(|(decl, cache)| match decl {
                    CacheDecl::Kv {
                        num_kv_heads,
                        head_dim,
                        group,
                        ..
                    } => {
                        (*num_kv_heads, *head_dim, *group)
                            == (cache.num_kv_heads, cache.head_dim, cache.group)
                    }
                    CacheDecl::State { .. } => false,
                });
        if !fits {
            return Err(Error::Unsupported {
                device: "cpu".into(),
                what: "a cache allocated for other layers than the plan's".into(),
            });
        }
        CpuExecutor::new(
            plan,
            weights,
            *data,
            geometry,
            (self.table, self.mode),
            Arc::clone(&self.pool),
        )
    }
}

impl Target for CpuDevice {
    fn supports(&self, op: &Op, inputs: &[ValueType]) -> bool {
        let tensors_fit = inputs.iter().all(|input| match input {
            ValueType::Tensor(ty) => ty.dtype == DType::I32 || DType::WEIGHTS.contains(&ty.dtype),
            ValueType::Batch | ValueType::Cache(_) => true,
        });
        tensors_fit
            && match op {
                Op::Embed
                | Op::Linear
                | Op::Add
                | Op::Mul
                | Op::Scale(_)
                | Op::Softcap(_)
                | Op::Act(_)
                | Op::Glu(_)
                | Op::RmsNorm { .. }
                | Op::Rope(_)
                | Op::View(_)
                | Op::TakeOutputs
                | Op::KvWrite
                | Op::Attention(_)
                | Op::Route(_)
                | Op::ExpertGlu(_)
                | Op::ExpertDown
                | Op::Fused(_) => true,
                Op::Weight(_) | Op::Tokens | Op::Positions | Op::Batch | Op::Cache(_) => false,
            }
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(Topology::detect().free_bytes())
    }

    fn load_weight(&self, decl: &WeightDecl, bytes: &WeightBytes, usage: WeightUsage) -> Result<Tensor> {
        storage::load_weight(self.table, &self.slabs, decl, bytes, usage)
    }

    fn alloc_kv(&self, caches: &[CacheDecl], geometry: &KvGeometry) -> Result<KvStorage> {
        let (kv, bytes) = storage::alloc_kv(caches, geometry)?;
        Ok(KvStorage {
            geometry: geometry.clone(),
            data: Box::new(kv),
            bytes,
        })
    }

    fn step_note(&self, plan: &Plan, step: &Step, usage: &[WeightUsage]) -> StepNote {
        let matrix = |operand: &Operand| match operand {
            Operand::Weight(id) => {
                let used = usage.get(id.0 as usize)?;
                let decl = plan.weights.get(id.0 as usize)?;
                let layout = if used.linear {
                    pack::layout_in(self.table, decl)
                } else {
                    Layout::RowMajor
                };
                (used.linear || used.embed).then_some((decl.dtype, layout))
            }
            _ => None,
        };
        let matrix = step.inputs.iter().find_map(matrix);
        let name = match (&step.op, matrix) {
            (Op::Linear | Op::Fused(FusedOp::LinearGroup { .. }), Some((dtype, _))) => {
                format!("linear.{dtype}")
            }
            (Op::Fused(FusedOp::LinearGlu(_)), Some((dtype, _))) => format!("linear_glu.{dtype}"),
            (Op::Embed, Some((dtype, _))) => format!("embed.{dtype}"),
            (op, _) => op.name().to_owned(),
        };
        StepNote {
            kernel: format!("{name}@{}", self.table.isa),
            layout: matrix.map(|(_, layout)| layout),
        }
    }

    fn compile(&self, plan: Plan, weights: Vec<Tensor>, kv: KvStorage) -> Result<Box<dyn Executor>> {
        Ok(Box::new(self.compile_cpu(&plan, &weights, kv)?))
    }
}

/// Holds every kernel table this CPU has against [`dynair::eval`], with the short list of cases; for `doctor`.
pub fn self_test() -> Vec<SelfTestResult> {
    let short = crate::self_test::short();
    let wide = crate::self_test::short_wide();
    let exact = table::tables()
        .into_iter()
        .map(|t| (t, Mode::Exact, short.clone()));
    let of_form = [Form::Short, Form::Tiles].into_iter().flat_map(|form| {
        let tables = table::tables()
            .into_iter()
            .filter(move |t| ops::linear::has_form(t, form));
        tables.map(move |t| (t, Mode::Auto, crate::self_test::short_from(t, form)))
    });
    // From tiles attention is coarser, and among their cases.
    let vectors =
        |t: &&KernelTable| ops::attention::Many::of(t).is_some() && !ops::linear::has_form(t, Form::Tiles);
    let vectors = table::tables().into_iter().filter(vectors);
    let auto = of_form.chain(vectors.map(|t| (t, Mode::Auto, wide.clone())));
    let mut results = Vec::new();
    for (table, mode, cases) in exact.chain(auto) {
        let isa = table.isa.name();
        match CpuDevice::new(&CpuOptions {
            threads: Some(2),
            mode,
            isa: Some(isa.into()),
        }) {
            Ok(device) => results.extend(
                cases
                    .iter()
                    .map(|case| crate::self_test::run(&device, case, true)),
            ),
            Err(error) => results.push(SelfTestResult {
                name: "device".into(),
                isa: isa.into(),
                error: f64::INFINITY,
                tolerance: 0.0,
                failure: Some(error.to_string()),
            }),
        }
    }
    results
}

#[cfg(test)]
mod tests;
