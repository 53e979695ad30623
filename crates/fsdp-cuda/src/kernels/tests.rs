//! Checks that the real compiler accepts every source for every pair of types in use. This needs no GPU; where NVRTC is
//! not installed, only the fake compiler of the integration tests is used.

use fsdp_core::DType;

use fsdp_nn::update::{AdamW, ElementwiseRule, Ema, Groups, Lion, ScheduleFree, Sgd};

use super::{CONVERT, EXACT, FACTORED, INTEGERS, LOSS, NORMS, POINTWISE, Source, image};
use crate::error::DeviceError;
use crate::update::{Kind, source};

/// The kernels of the element-wise rules.
fn updates() -> Vec<&'static Source> {
    let momentum = Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() };
    let groups = Groups::uniform(0.1);
    let free = ScheduleFree { betas: (0.9, 0.99), eps: 1e-8, warmup_steps: 2, groups };
    let rules: [&dyn ElementwiseRule; 6] =
        [&AdamW::default(), &Sgd::default(), &momentum, &Lion::default(), &Ema { decay: 0.9 }, &free];
    let elements = rules.map(|rule| source(Kind::Elements, &rule.formula().0));
    elements.into_iter().chain([source(Kind::Coded, &AdamW::default().formula().0)]).collect()
}

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
                cases.extend(updates().into_iter().chain([&FACTORED]).map(|source| (source, (t, s))));
            }
        }
    }
    cases
}

#[test]
fn every_kernel_source_compiles_with_nvrtc() {
    std::thread::scope(|scope| {
        for arch in ["sm_80", "sm_90", "sm_100"] {
            scope.spawn(move || compile_all(arch));
        }
    });
}

fn compile_all(arch: &str) {
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
