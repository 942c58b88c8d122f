#![no_main]

#[path = "../contained.rs"]
mod contained;
#[path = "../entries.rs"]
#[allow(dead_code)]
mod entries;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    contained::panics_pass();
    entries::sentencepiece(bytes)
});
