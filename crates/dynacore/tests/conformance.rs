//! Every op case on every kernel table of this CPU, against `dynair::eval`, with the planner's fused ops and without.
//!
//! Tolerances and their reasons stand with the cases. A case that fails is named with its error; all of them are run
//! before the test ends.

use dynacore::cpu::table::tables;
use dynacore::cpu::{CpuDevice, CpuOptions, Mode};
use dynacore::self_test::{Case, fuses, run};
use testkit::op_cases;

fn devices() -> Vec<CpuDevice> {
    let new = |options| CpuDevice::new(&options).expect("a device can be made");
    let mut all: Vec<CpuDevice> = tables()
        .iter()
        .map(|t| {
            new(CpuOptions {
                threads: Some(2),
                isa: Some(t.isa.name().into()),
                mode: Mode::Auto,
            })
        })
        .collect();
    all.push(new(CpuOptions {
        threads: Some(1),
        isa: None,
        mode: Mode::Safe,
    }));
    all
}

fn check(cases: &[Case]) {
    let mut failures = Vec::new();
    for device in devices() {
        for case in cases {
            for fused in [true, false] {
                if !fused && !fuses(&device, case) {
                    continue;
                }
                let result = run(&device, case, fused);
                if !result.passed() {
                    failures.push(format!("{result:?} (allowed: {})", case.reason));
                }
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn elementwise() {
    check(&op_cases::elementwise_cases());
}

#[test]
fn norm() {
    check(&op_cases::norm_cases());
}

#[test]
fn rope() {
    check(&op_cases::rope_cases());
}

#[test]
fn linear() {
    check(&op_cases::linear_cases());
}

#[test]
fn attention() {
    check(&op_cases::attention_cases());
}
