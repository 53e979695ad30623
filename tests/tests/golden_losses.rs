//! Label smoothing and z-loss, compared with PyTorch (tests/golden/loss_terms.py), and the balancing loss of routers,
//! compared with transformers (tests/golden/router_loss.py), in double precision.

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_nn::backend::{Backend, BatchFacts, IGNORED_TARGET, Operands, Write};
use fsdp_nn::op::{Experts, Gating, Head, LogitsDims, LossTerms, Op, RouterTerms, Routing};
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

fn read(memory: &HostMemory, buffer: &HostBuffer) -> Vec<f64> {
    let mut values = vec![0.0; buffer.len()];
    memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values)).unwrap();
    values
}

fn assert_close(memory: &HostMemory, buffer: &HostBuffer, expected: &[f64], what: &str) {
    let got = read(memory, buffer);
    assert_eq!(got.len(), expected.len(), "{what}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= TOLERANCE * (1.0 + expected.abs()),
            "{what}, {index}: {got} for {expected}"
        );
    }
}

#[test]
fn smoothed_and_z_losses_and_gradients_match_pytorch() {
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
        let terms = LossTerms { label_smoothing, z_loss, ..LossTerms::default() };
        let dims = LogitsDims { terms, ..LogitsDims::new(targets.len(), vocab) };
        let mut there = filled(&memory, &logits);
        let mut found = filled(&memory, &vec![0.0; targets.len()]);
        let mut ids = memory.allocate(Category::Workspace, DType::U32, targets.len()).unwrap();
        memory.write(Queue::Compute, HostSlice::U32(&targets), SliceMut::whole(&mut ids)).unwrap();
        let op = Op::Head(Head::CrossEntropyBackward { dims, is_rounded: false });
        let mut z = filled(&memory, &vec![0.0; targets.len()]);
        let written = [&mut there, &mut found].into_iter().chain((z_loss > 0.0).then_some(&mut z));
        let writes = &mut written.map(|to| Write::over(SliceMut::whole(to))).collect::<Vec<_>>();
        memory
            .run(&op, Operands { reads: &[Slice::whole(&ids)], writes, batch: BatchFacts::default() })
            .unwrap();
        assert_close(&memory, &found, &losses, &format!("losses with {terms:?}"));
        let normalizer = |row: &[f64]| row.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        let of_row = |(row, &target): (&[f64], &u32)| {
            if target == IGNORED_TARGET { 0.0 } else { z_loss * normalizer(row).powi(2) }
        };
        let of_rows: Vec<f64> = logits.chunks(vocab).zip(&targets).map(of_row).collect();
        assert_close(&memory, &z, &of_rows, &format!("z-losses with {terms:?}"));
        assert_close(&memory, &there, &numbers(entry, "gradient"), &format!("gradient with {terms:?}"));
    }
}

/// Returns the balancing loss of an entry, and its gradients with respect to the logits of all layers.
fn balanced(memory: &HostMemory, entry: &Value) -> (f64, Vec<Vec<f64>>) {
    let [experts, top] = ["experts", "top"].map(|key| entry[key].as_u64().unwrap() as usize);
    let lengths: Vec<usize> = numbers(entry, "lengths").iter().map(|&length| length as usize).collect();
    let logits: Vec<HostBuffer> = (entry["logits"].as_array().unwrap().iter())
        .map(|layer| {
            filled(memory, &layer.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>())
        })
        .collect();
    let routing = Routing::whole(6 * lengths.len(), experts, top);
    let terms = RouterTerms {
        layers: logits.len(),
        experts,
        balance: 1.0,
        z_loss: 0.0,
        sequence: 0.0,
        loss_scale: 1.0,
    };
    let gating = Gating::softmax(true);
    let counted_rows = lengths.iter().sum();
    let batch = BatchFacts { targets: 1, counted_rows, lengths: &lengths, ..BatchFacts::default() };
    let run = |op, reads: &[Slice<'_, HostBuffer>], writes: &mut [&mut HostBuffer]| {
        let mut writes: Vec<_> =
            writes.iter_mut().map(|buffer| Write::over(SliceMut::whole(&mut **buffer))).collect();
        memory.run(&Op::Experts(op), Operands { reads, writes: &mut writes, batch }).unwrap();
    };
    let zeros = |len| filled(memory, &vec![0.0; len]);
    let (mut loads, mut routes) = (Vec::new(), Vec::new());
    for logits in &logits {
        let (mut weights, mut load) = (zeros(routing.slots()), zeros(terms.load_len()));
        let mut chosen = memory.allocate(Category::Workspace, DType::U32, routing.slots()).unwrap();
        let op = Experts::Route { routing, gating, load: Some(terms) };
        run(op, &[Slice::whole(logits)], &mut [&mut weights, &mut chosen, &mut load]);
        loads.extend(read(memory, &load));
        routes.push(chosen);
    }
    let (loads, mut loss, dweights) = (filled(memory, &loads), zeros(1), zeros(routing.slots()));
    run(Experts::BalanceLoss { terms }, &[Slice::whole(&loads)], &mut [&mut loss]);
    let gradient = |(logits, routes): (&HostBuffer, &HostBuffer)| {
        let mut dlogits = zeros(routing.rows * experts);
        let op = Experts::RouteBackward { routing, gating, terms: Some(terms) };
        run(op, &[logits, routes, &dweights, &loads].map(Slice::whole), &mut [&mut dlogits]);
        read(memory, &dlogits)
    };
    (read(memory, &loss)[0], logits.iter().zip(&routes).map(gradient).collect())
}

#[test]
fn router_balancing_loss_and_gradients_match_transformers() {
    let text = std::fs::read_to_string(golden("router_loss.json")).unwrap();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(entries.len(), 4);
    let memory = HostMemory::new(HostOptions::default()).unwrap();
    for entry in &entries {
        let (loss, gradients) = balanced(&memory, entry);
        let expected = entry["loss"].as_f64().unwrap();
        // transformers adds at most 72 numbers, and multiplies, in f32.
        let band = 80.0 * f64::from(f32::EPSILON);
        assert!((loss - expected).abs() <= band * expected, "{loss} for {expected}");
        let layers = entry["gradients"].as_array().unwrap();
        assert_eq!(gradients.len(), layers.len());
        for (layer, got) in layers.iter().zip(&gradients) {
            let layer = layer.as_array().unwrap();
            assert_eq!(layer.len(), got.len());
            for (got, expected) in got.iter().zip(layer.iter().map(|x| x.as_f64().unwrap())) {
                assert!((got - expected).abs() <= band, "{got} for {expected}");
            }
        }
        assert!(gradients.iter().flatten().any(|gradient| gradient.abs() > 1e-3), "nothing was compared");
    }
}
