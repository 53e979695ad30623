//! Checks that the real compiler accepts every source for every pair of types in use. This needs no GPU; where NVRTC is
//! not installed, only the fake compiler of the integration tests is used.

use fsdp_core::DType;

use super::{CONVERT, EXACT, FACTORED, INTEGERS, LOSS, NORMS, POINTWISE, Source, UPDATE, image};
use crate::error::DeviceError;

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];

fn cases() -> Vec<(&'static Source, (DType, DType))> {
    let mut cases = vec![
        (&EXACT, (DType::F64, DType::F64)),
        (&INTEGERS, (DType::I64, DType::I64)),
        (&LOSS, (DType::F32, DType::Bf16)),
        (&LOSS, (DType::F32, DType::F16)),
    ];
    for t in FLOATS {
        cases.extend([&NORMS, &POINTWISE, &LOSS, &EXACT].map(|source| (source, (t, t))));
        for s in FLOATS {
            cases.push((&CONVERT, (t, s)));
            if t == t.master() {
                cases.extend([&UPDATE, &FACTORED].map(|source| (source, (t, s))));
            }
        }
    }
    cases
}

#[test]
fn every_kernel_source_compiles_with_nvrtc() {
    for arch in ["sm_80", "sm_90", "sm_100"] {
        for (source, types) in cases() {
            match image(source, types, arch) {
                Err(DeviceError::Compiler(_)) => {
                    assert!(std::env::var_os("FSDP_TEST_NVRTC").is_none(), "libnvrtc is not installed");
                    println!("skipped: libnvrtc is not installed");
                    return;
                }
                Err(error) => panic!("{error}"),
                Ok(image) => {
                    let has = |name: &&str| image.windows(name.len()).any(|part| part == name.as_bytes());
                    assert!(source.kernels().iter().all(has), "{} has its kernels", source.name);
                }
            }
        }
    }
}
