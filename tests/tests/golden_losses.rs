//! Label smoothing and z-loss against PyTorch (tests/golden/loss_terms.py), in double precision.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_nn::backend::{Backend, BatchFacts, IGNORED_TARGET, Operands, Write};
use fsdp_nn::op::{Head, LogitsDims, LossTerms, Op};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions};
use serde_json::Value;

use crate::golden_training::golden;

const TOLERANCE: f64 = 1e-13;

fn numbers(entry: &Value, key: &str) -> Vec<f64> {
    entry[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn filled(memory: &HostMemory, values: &[f64]) -> HostBuffer {
    let mut buffer = memory.allocate(Category::Workspace, DType::F64, values.len()).unwrap();
    memory.write(Queue::Compute, HostSlice::F64(values), SliceMut::whole(&mut buffer)).unwrap();
    buffer
}

fn assert_close(memory: &HostMemory, buffer: &HostBuffer, expected: &[f64], what: &str) {
    let mut got = vec![0.0; expected.len()];
    memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut got)).unwrap();
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= TOLERANCE * (1.0 + expected.abs()),
            "{what}, {index}: {got} for {expected}"
        );
    }
}

#[test]
fn smoothed_and_z_losses_and_their_gradients_are_those_of_pytorch() {
    let text = std::fs::read_to_string(golden("loss_terms.json")).unwrap();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(entries.len(), 12);
    let memory = HostMemory::new(HostOptions::default()).unwrap();
    for entry in &entries {
        let [label_smoothing, z_loss] = ["label_smoothing", "z_loss"].map(|key| entry[key].as_f64().unwrap());
        let (logits, losses) = (numbers(entry, "logits"), numbers(entry, "losses"));
        let targets: Vec<u32> = numbers(entry, "targets")
            .iter()
            .map(|&t| if t < 0.0 { IGNORED_TARGET } else { t as u32 })
            .collect();
        let vocab = entry["vocab"].as_u64().unwrap() as usize;
        let terms = LossTerms { label_smoothing, z_loss };
        let dims = LogitsDims { terms, ..LogitsDims::new(targets.len(), vocab) };
        let mut there = filled(&memory, &logits);
        let mut found = filled(&memory, &vec![0.0; targets.len()]);
        let mut ids = memory.allocate(Category::Workspace, DType::U32, targets.len()).unwrap();
        memory.write(Queue::Compute, HostSlice::U32(&targets), SliceMut::whole(&mut ids)).unwrap();
        let op = Op::Head(Head::CrossEntropyBackward { dims, rounds: false });
        let writes =
            &mut [Write::over(SliceMut::whole(&mut there)), Write::over(SliceMut::whole(&mut found))];
        memory
            .run(&op, Operands { reads: &[Slice::whole(&ids)], writes, batch: BatchFacts::default() })
            .unwrap();
        assert_close(&memory, &found, &losses, &format!("losses with {terms:?}"));
        assert_close(&memory, &there, &numbers(entry, "gradient"), &format!("gradient with {terms:?}"));
    }
}
