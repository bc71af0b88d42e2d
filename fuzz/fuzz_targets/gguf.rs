//! Reading the header of any bytes answers, without panic and without memory beyond a small multiple of the input;
//! what is accepted lies inside the file.
//!
//! `cargo fuzz run gguf -- -max_total_time=60 -rss_limit_mb=512`

#![no_main]

use std::path::Path;

use dynalm::format::gguf::header::{Fault, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("fuzz.gguf");
    let length = bytes.len() as u64;
    match parse(path, bytes, length) {
        Ok(header) => {
            for t in &header.tensors {
                assert!(t.bytes > 0 && t.start + t.bytes <= length, "`{}` reaches past the end", t.name);
            }
        }
        Err(Fault::NeedMore(n)) => panic!("a whole file asks for {n} of {length} bytes"),
        Err(Fault::Refused(_)) => {}
    }
    // The beginning of a longer file may ask for more, and then for more than there is.
    if let Err(Fault::NeedMore(n)) = parse(path, bytes, length + 4096) {
        assert!(n > length);
    }
});
