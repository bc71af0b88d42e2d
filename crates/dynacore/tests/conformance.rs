//! Every op case on every kernel table of this CPU, against `dynair::eval`, with the planner's fused ops and without.
//!
//! Tolerances and their reasons stand with the cases. A case that fails is named with its error; all of them are run
//! before the test ends.

use dynacore::cpu::isa::Isa;
use dynacore::cpu::ops::linear::tiles;
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

/// Devices in `auto` mode of the tables that have tiles, or of those of vectors that have none.
fn auto_devices(with_tiles: bool) -> Vec<CpuDevice> {
    let auto = |t: &KernelTable| CpuOptions {
        threads: Some(2),
        isa: Some(t.isa.name().into()),
        mode: Mode::Auto,
    };
    tables()
        .into_iter()
        .filter(|t| t.isa != Isa::Portable && tiles(t, 1000, 32) == with_tiles)
        .map(|t| CpuDevice::new(&auto(t)).expect("a device can be made"))
        .collect()
}

#[test]
fn from_tiles() {
    check_on(&auto_devices(true), &op_cases::tile_cases());
}

/// Many lines together, from vectors: no less precise than few.
#[test]
fn wide_attention() {
    check_on(&auto_devices(false), &op_cases::attention_cases());
}

#[test]
fn experts() {
    check(&op_cases::expert_cases());
}

#[test]
fn attention() {
    check(&op_cases::attention_cases());
}
