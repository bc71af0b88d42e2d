use super::*;
use crate::self_test::{Case, cases, execute, run, short};

fn device(isa: Isa, threads: usize) -> CpuDevice {
    let isa = Some(isa.name().to_owned());
    CpuDevice::new(&CpuOptions {
        threads: Some(threads),
        isa,
        ..CpuOptions::default()
    })
    .expect("a device can be made")
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

fn check(device: &CpuDevice, case: &Case, fused: bool) {
    let result = run(device, case, fused);
    assert!(result.passed(), "{result:?}: allowed because {}", case.reason);
}

/// In this crate's own tests the ledgers of shared memory are on: these cases also hold the drivers to the rule that
/// makes their views sound.
#[test]
fn the_short_self_test_passes_on_every_table_fused_and_plain() {
    for isa in isas() {
        let device = device(isa, 3);
        for case in short() {
            check(&device, &case, true);
            check(&device, &case, false);
        }
    }
    assert!(self_test().iter().all(SelfTestResult::passed));
}

#[test]
fn attention_is_bit_equal_whatever_the_number_of_workers() {
    for isa in isas() {
        for window in [None, Some(40)] {
            let case = cases::attention(&cases::Attention {
                window,
                ..cases::Attention::default()
            });
            let alone = execute(&device(isa, 1), &case, true).expect("the case runs");
            for threads in [2, 3, 8] {
                assert_eq!(
                    execute(&device(isa, threads), &case, true).expect("the case runs"),
                    alone
                );
            }
        }
    }
}
