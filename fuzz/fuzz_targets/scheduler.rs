//! Random arrivals, aborts, drafts and steps in random pools: every reply must equal the solo reply and no
//! block be lost. The oracle is the one of the property tests.
#![no_main]

#[path = "../../crates/dynalm/tests/scheduler/oracle.rs"]
#[expect(dead_code, reason = "the property tests use more of it")]
mod oracle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| oracle::replay(data));
