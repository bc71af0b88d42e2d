//! `dynalm doctor`: what this machine supports, whether its kernels compute what they should, and how a model would
//! run on it.

use clap::Args;
use dynacore::Device;
use dynacore::cpu::{self, Topology, isa::Isa};
use dynacore::self_test::SelfTestResult;

use super::options::ModelArgs;
use super::{console, pull, session, text};
use crate::load;
use crate::settings::Settings;

/// Context at which `--plan` states bytes and operations, tokens.
const PLAN_CONTEXT: usize = 512;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Also say whether and how this model would run
    #[arg(value_name = "MODEL")]
    name: Option<String>,
    /// Print the model's plan: every step with its op, shapes, bytes, operations, kernel and layout
    #[arg(long, requires = "name")]
    plan: bool,
    /// Skip the kernel self-test
    #[arg(long)]
    no_test: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) model: ModelArgs,
}

pub(super) fn run(args: &DoctorArgs, settings: &Settings) -> anyhow::Result<()> {
    let topology = Topology::detect();
    let device = session::device(settings)?;
    let info = device.info().clone();
    let tests = if args.no_test {
        Vec::new()
    } else {
        cpu::self_test()
    };
    let failed = tests.iter().filter(|t| !t.passed()).count();
    let findings = Findings {
        warnings: warnings(&topology, &info, failed),
        topology,
        info,
        tested: !args.no_test,
        tests,
        failed,
        model: match &args.name {
            Some(name) => Some(model_report(name, args, settings, &device)?),
            None => None,
        },
    };
    if args.json {
        text::out(&format!("{}\n", serde_json::to_string_pretty(&findings.json())?))?;
    } else {
        findings.print()?;
    }
    anyhow::ensure!(
        failed == 0,
        "{failed} kernel cases differ from the reference on this machine; use --mode safe"
    );
    Ok(())
}

/// What was found out about this machine, and the model.
struct Findings {
    topology: Topology,
    info: dynacore::DeviceInfo,
    tested: bool,
    tests: Vec<SelfTestResult>,
    failed: usize,
    warnings: Vec<String>,
    model: Option<Report>,
}

impl Findings {
    /// Kernel tables that run here.
    fn isas(&self) -> Vec<&'static str> {
        Isa::ALL
            .iter()
            .filter(|i| i.available())
            .map(|i| i.name())
            .collect()
    }

    fn json(&self) -> serde_json::Value {
        let (topology, info) = (&self.topology, &self.info);
        let mut report = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cpu": {
                "name": topology.model_name, "logical_cpus": topology.logical_cpus,
                "allowed_cpus": topology.allowed_cpus, "physical_cores": topology.physical_cores,
                "fast_cores": topology.fast_cores,
                "auto_threads": topology.auto_threads(),
                "quota_cores": topology.quota_cores, "threads": info.units,
                "tables": self.isas(), "table": info.isa,
            },
            "memory": {"total_bytes": topology.total_bytes(), "free_bytes": topology.free_bytes()},
            "gpus": [],
            "self_test": {"cases": self.tests.len(), "failed": self.failed},
            "warnings": self.warnings,
        });
        if let Some(model) = &self.model {
            report["model"] = model.json.clone();
        }
        report
    }

    fn print(&self) -> anyhow::Result<()> {
        let mut rows = self.machine();
        if self.tested {
            let verdict = if self.failed == 0 { "passed" } else { "FAILED" };
            rows.push(vec![
                "self-test".to_owned(),
                format!(
                    "{} of {} cases {verdict}",
                    if self.failed == 0 {
                        self.tests.len()
                    } else {
                        self.failed
                    },
                    self.tests.len()
                ),
            ]);
        }
        text::out(&console::table(&rows))?;
        for t in self.tests.iter().filter(|t| !t.passed()) {
            text::out(&format!(
                "failed: {} on {}: error {:.1e}, allowed {:.1e}{}\n",
                t.name,
                t.isa,
                t.error,
                t.tolerance,
                t.failure
                    .as_deref()
                    .map_or_else(String::new, |f| format!(" ({f})"))
            ))?;
        }
        for warning in &self.warnings {
            text::out(&format!("warning: {warning}\n"))?;
        }
        if let Some(model) = &self.model {
            text::out(&format!("\n{}", model.text))?;
        }
        Ok(())
    }

    /// The machine as rows of a table.
    fn machine(&self) -> Vec<Vec<String>> {
        let quota = self
            .topology
            .quota_cores
            .map_or_else(String::new, |q| format!(", quota {q:.2} cores"));
        let (physical, fast) = (self.topology.physical_cores, self.topology.fast_cores);
        let kinds = if fast < physical {
            format!(" ({fast} fast, {} efficiency)", physical - fast)
        } else {
            String::new()
        };
        vec![
            vec!["version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()],
            vec!["cpu".to_owned(), self.topology.model_name.clone()],
            vec![
                "cores".to_owned(),
                format!(
                    "{} CPUs, {} of them allowed, {physical} physical cores{kinds}{quota}; {} worker threads \
                     (auto: {})",
                    self.topology.logical_cpus,
                    self.topology.allowed_cpus,
                    self.info.units,
                    self.topology.auto_threads()
                ),
            ],
            vec![
                "kernels".to_owned(),
                format!("{} (of {})", self.info.isa, self.isas().join(", ")),
            ],
            vec![
                "memory".to_owned(),
                format!(
                    "{} free of {}",
                    console::bytes(self.topology.free_bytes()),
                    console::bytes(self.topology.total_bytes())
                ),
            ],
            vec![
                "gpu".to_owned(),
                "none: this build has the CPU device only".to_owned(),
            ],
        ]
    }
}

fn warnings(topology: &Topology, info: &dynacore::DeviceInfo, failed: usize) -> Vec<String> {
    let mut all = Vec::new();
    let granted = topology.granted_cores();
    if info.units > granted {
        all.push(format!(
            "{} threads on {granted} granted cores slow each other down; use --threads auto",
            info.units,
        ));
    }
    if info.isa == "portable" {
        all.push(
            "only the portable kernels are in use; a CPU with AVX2 or NEON is many times faster".to_owned(),
        );
    }
    if failed > 0 {
        all.push(
            "kernels compute wrong results here; please report this CPU, and use --mode safe".to_owned(),
        );
    }
    all
}

struct Report {
    text: String,
    json: serde_json::Value,
}

fn model_report(
    name: &str,
    args: &DoctorArgs,
    settings: &Settings,
    device: &dyn Device,
) -> anyhow::Result<Report> {
    let path = pull::find_or_pull(name, settings)?;
    let checkpoint = load::open(&path)?;
    let options = session::load_options(settings, 1, args.model.chat_template.as_deref())?;
    let weights: u64 = checkpoint.gguf.tensors().iter().map(|t| t.bytes() as u64).sum();
    let caches = checkpoint.graph.caches.clone();
    let facts = checkpoint.facts.clone();
    let plan = load::plan(checkpoint.graph, device, &options)?;
    let free = device
        .free_bytes()?
        .saturating_sub(weights + plan.arena_bytes as u64);
    let cache = load::size_cache(&caches, facts.trained_context, free, &options)?;
    let fits = free > cache.bytes as u64;
    let rows = vec![
        vec![
            "model".to_owned(),
            format!("{} ({}, {})", facts.title, facts.architecture, facts.quantization),
        ],
        vec!["weights".to_owned(), console::bytes(weights)],
        vec![
            "context".to_owned(),
            format!("{} of {} tokens", cache.max_context, facts.trained_context),
        ],
        vec![
            "cache".to_owned(),
            format!("{} when full", console::bytes(cache.bytes as u64)),
        ],
        vec![
            "intermediates".to_owned(),
            console::bytes(plan.arena_bytes as u64),
        ],
        vec![
            "fits".to_owned(),
            if fits { "yes, on the cpu device" } else { "no" }.to_owned(),
        ],
        vec!["steps".to_owned(), plan.steps.len().to_string()],
    ];
    let mut text = console::table(&rows);
    let mut json = serde_json::json!({
        "path": path, "title": facts.title, "architecture": facts.architecture, "quantization": facts.quantization,
        "weight_bytes": weights, "context": cache.max_context, "cache_bytes": cache.bytes,
        "arena_bytes": plan.arena_bytes, "fits": fits, "steps": plan.steps.len(),
    });
    if args.plan {
        let size = dynair::plan::StepSize {
            kv_block: options.kv.block(),
            ..dynair::plan::StepSize::decode(cache.max_context.min(PLAN_CONTEXT))
        };
        let usage = dynacore::device::weight_usage(&plan);
        let listing = plan.to_text_with(&size, &|step| {
            format!(" {}", device.step_note(&plan, step, &usage))
        });
        json["plan"] = listing.lines().collect::<Vec<_>>().into();
        text.push('\n');
        text.push_str(&listing);
    }
    Ok(Report { text, json })
}
