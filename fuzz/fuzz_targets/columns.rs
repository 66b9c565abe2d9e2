#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| idem_fuzz::columns::columns_as_stored(data));
