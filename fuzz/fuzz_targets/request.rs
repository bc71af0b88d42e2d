//! Reading any request body answers: accepted, or refused with a message and, where a field is at fault, its name.
//!
//! `cargo fuzz run request -- -max_total_time=60`

#![no_main]

use dynalm::server::{Route, check_body};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    for route in [Route::Chat, Route::Completions] {
        if let Err(error) = check_body(route, body, 1000) {
            assert_eq!(error.status, 400);
            assert!(!error.message.is_empty());
            // A hostile body must not make a huge reply.
            assert!(error.body().len() < 4096, "{}", error.body());
        }
    }
});
