//! Checks that update rules do not wait for the device, and counts the kernels that they launch.

use fsdp_core::DType;
use fsdp_core::memory::Slice;
use fsdp_core::update::{RuleState, SegmentShard, StepScalars};
use fsdp_nn::update::{Adafactor, AdafactorOptions, AdamW, Part, Rule, Sgd};

use crate::subject::cuda_on;
use crate::update::{FACTORS, SHORT, pieces, run, spec};
use crate::values::*;

/// Runs a step of a rule, checks that it does not wait, and returns the number of kernels it launched.
fn launches(rule: impl Into<Part>) -> usize {
    let rule = Rule::new(rule);
    let device = crate::fake_cuda::device();
    let memory = &cuda_on(device);
    let (pieces, len) = pieces(SHORT);
    let mut params = filled(memory, DType::F32, &normal(1, len));
    let mut low = filled(memory, DType::Bf16, &normal(1, len));
    let gradient = filled(memory, DType::F32, &normal(2, len));
    let tensors = rule.state(&pieces, len, DType::F32);
    let state = tensors.iter().map(|tensor| filled(memory, tensor.dtype, &vec![0.0; tensor.len]));
    let mut state: Vec<_> = state.collect();
    let factors = filled(memory, DType::F64, &FACTORS.to_array());
    let scalars = StepScalars { step: 1, lr: 0.1, factors: Slice::whole(&factors) };
    let mut not_finite = integers(memory, &[0]);
    let waits =
        || ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"].map(|call| device.calls(call));
    let mut step = || {
        let mut shard = SegmentShard {
            params: &mut params,
            low: Some(&mut low),
            gradient: &gradient,
            state: &mut state,
            pieces: &pieces,
            segment: None,
            whole: None,
            not_finite: &mut not_finite,
        };
        run(&rule, memory, &mut shard, &scalars).unwrap();
    };
    // The first step allocates from the driver, and waits for the poisoning of new storage.
    step();
    let (before, launched) = (waits(), device.calls("cuLaunchKernel"));
    step();
    assert_eq!(waits(), before);
    device.calls("cuLaunchKernel") - launched
}

#[test]
fn update_rules_do_not_wait_for_device() {
    assert_eq!(launches(AdamW::default()), 2, "one for every run of pieces");
    assert_eq!(launches(Sgd { momentum: 0.9, ..Sgd::default() }), 2, "one for every run of pieces");
    let options = AdafactorOptions { beta1: Some(0.9), ..AdafactorOptions::default() };
    let expected = 3 * (6 + 3 + 1) + (3 + 2 + 1);
    assert_eq!(
        launches(Adafactor::new(options, &spec(SHORT))),
        expected,
        "ten for a matrix, six for a vector"
    );
}
