//! Every op case on every kernel table of this CPU, against `dynair::eval`, with the planner's fused ops and without.
//!
//! Tolerances and their reasons stand with the cases. A case that fails is named with its error; all of them are run
//! before the test ends.

use dynacore::cpu::isa::Isa;
use dynacore::cpu::ops::linear::{Form, has_form};
use dynacore::cpu::table::{KernelTable, tables};
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
                mode: Mode::Exact,
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
    check_on(&devices(), cases);
}

fn check_on(devices: &[CpuDevice], cases: &[Case]) {
    let mut failures = Vec::new();
    for device in devices {
        for case in cases {
            for fused in [true, false] {
                if !fused && !fuses(device, case) {
                    continue;
                }
                let result = run(device, case, fused);
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

/// Devices in `auto` mode whose tables have a form.
fn in_auto(has: impl Fn(&KernelTable) -> bool) -> Vec<CpuDevice> {
    let auto = |t: &KernelTable| CpuOptions {
        threads: Some(2),
        isa: Some(t.isa.name().into()),
        mode: Mode::Auto,
    };
    tables()
        .into_iter()
        .filter(|t| has(t))
        .map(|t| CpuDevice::new(&auto(t)).expect("a device can be made"))
        .collect()
}

#[test]
fn from_tiles() {
    let devices = in_auto(|t| has_form(t, Form::Tiles));
    check_on(&devices, &op_cases::tile_cases());
}

/// Many lines together, from vectors: no less precise than few.
#[test]
fn wide_attention() {
    let devices = in_auto(|t| t.isa != Isa::Portable && !has_form(t, Form::Tiles));
    check_on(&devices, &op_cases::attention_cases());
}

#[test]
fn from_short_records() {
    let devices = in_auto(|t| has_form(t, Form::Short) && !has_form(t, Form::Tiles));
    check_on(&devices, &op_cases::short_cases(usize::MAX));
    // Where many rows are made from tiles, few are not.
    let devices = in_auto(|t| has_form(t, Form::Short) && has_form(t, Form::Tiles));
    check_on(&devices, &op_cases::short_cases(6));
}

#[test]
fn experts() {
    check(&op_cases::expert_cases());
}

#[test]
fn attention() {
    check(&op_cases::attention_cases());
}
