//! Compares documents packed into samples with documents in samples of their own.

use std::ops::Range;
use std::sync::Arc;

use fsdp_core::DType;

use super::harness::{Subject, batch, gpt2, host, llama};
use crate::backend::{AttentionDims, BatchFacts, IGNORED_TARGET};
use crate::conformance::Calls;
use crate::conformance::decoders::relatives;
use crate::conformance::kit::{Kit, numbers};
use crate::hf::HfModel;
use crate::model::{Architecture, Batch, Decoder, DecoderConfig, Gpt2, Gpt2Config};
use crate::op::Scores;
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

/// The rows of documents in two samples of 7 tokens.
const DOCUMENTS: [Range<usize>; 5] = [0..3, 3..4, 4..7, 7..13, 13..14];

/// Models without dropout: masks are per sample, so documents in their own samples would have other masks.
fn models() -> Vec<HfModel> {
    let decoder = |config: DecoderConfig| -> HfModel {
        // The loss of routers is of all tokens of a micro-batch.
        let config = DecoderConfig { router_loss: 0.0, attention_dropout: 0.0, ..config };
        let config = DecoderConfig { residual_dropout: 0.0, embedding_dropout: 0.0, ..config };
        Arc::new(Decoder::new(&config).unwrap())
    };
    let gpt2 = Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..gpt2() };
    let gpt2: HfModel = Arc::new(Gpt2::new(&gpt2).unwrap());
    // The first one rotates by other angles in samples that are longer than its original positions.
    let relatives = relatives().map(decoder).into_iter().skip(1);
    [decoder(llama()), gpt2].into_iter().chain(relatives).collect()
}

fn packed() -> Batch {
    let positions = DOCUMENTS.iter().flat_map(|rows| 0..rows.len() as u32).collect();
    let mut batch = Batch { positions: Some(positions), ..batch(2, 7, 13) };
    batch.targets[5] = IGNORED_TARGET;
    batch
}

fn alone(rows: Range<usize>) -> Batch {
    let Batch { ids, targets, .. } = packed();
    let (seq, [ids, targets]) = (rows.len(), [ids, targets].map(|all| all[rows.clone()].to_vec()));
    Batch { ids, targets, samples: vec![0], seq, positions: None }
}

#[test]
fn packed_document_bits_do_not_depend_on_other_documents() {
    // Products of experts have rows of all documents.
    for model in models().into_iter().filter(|model| model.description().mixtures.is_empty()) {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16] {
            let subject = Subject::new(model.clone(), dtype);
            let logits = subject.logits(&host(), &packed());
            for rows in DOCUMENTS {
                let mut other = packed();
                let ids = other.ids.iter_mut().enumerate();
                ids.filter(|(row, _)| !rows.contains(row)).for_each(|(_, id)| *id = (*id + 1) % 13);
                let own = 13 * rows.start..13 * rows.end;
                let found = subject.logits(&host(), &other);
                assert_eq!(logits[own.clone()], found[own], "{rows:?} in {dtype}");
            }
            let together = Batch { positions: None, ..packed() };
            assert_ne!(subject.logits(&host(), &together), logits, "documents do not see each other");
        }
    }
}

/// Documents longer and shorter than a block of queries.
#[test]
fn packed_attention_matches_separate_document_bitwise() {
    const SEQ: usize = 190;
    let documents = [0..150, 150..151, 151..190, 190..380];
    for (dtype, window) in
        [(DType::F32, None), (DType::F64, Some(33)), (DType::Bf16, None), (DType::F16, None)]
    {
        let dims = AttentionDims { batch: 2, seq: SEQ, heads: 4, kv_heads: 2, head_dim: 6 };
        let (packed, width) = (dims.packed(), dims.heads * dims.head_dim);
        let (qkv, dy) = (numbers(1, dims.rows() * packed), numbers(2, dims.rows() * width));
        let scores = Scores { window, ..Scores::default() };
        let facts = BatchFacts { documents: &documents, ..BatchFacts::default() };
        let all = attention(dtype, dims, (Scores { packed: true, ..scores }, facts), [&qkv, &dy]);
        for rows in documents.clone() {
            let dims = AttentionDims { batch: 1, seq: rows.len(), ..dims };
            let of = |values: &[f64], width: usize| values[rows.start * width..rows.end * width].to_vec();
            let (qkv, dy) = (of(&qkv, packed), of(&dy, width));
            let [y, dqkv] = attention(dtype, dims, (scores, BatchFacts::default()), [&qkv, &dy]);
            assert_eq!([y, dqkv], [of(&all[0], width), of(&all[1], packed)], "{rows:?} in {dtype}");
        }
    }
}

/// Returns output and gradient.
fn attention(
    dtype: DType,
    dims: AttentionDims,
    facts: (Scores, BatchFacts<'_>),
    [qkv, dy]: [&[f64]; 2],
) -> [Vec<f64>; 2] {
    let kit = Kit::new(host(), dtype);
    let (qkv, dy, mut y) = (kit.put(qkv), kit.put(dy), kit.result(dy.len()));
    let (mut lse, mut dqkv) = (kit.statistics(dims.rows() * dims.heads), kit.result(qkv.read().len));
    kit.memory.attention(dims, facts, qkv.read(), y.write(), lse.write()).unwrap();
    let (of_y, of_lse, dy) = (y.read(), lse.read(), dy.read());
    kit.memory.attention_backward(dims, facts, qkv.read(), of_y, of_lse, dy, dqkv.write()).unwrap();
    [kit.get(&y), kit.get(&dqkv)]
}

/// Bound of the difference between two computations in double precision with different orders of sums: matrix
/// products with other numbers of rows, and sums over rows. Sums here have fewer than 30 terms, in chains of fewer
/// than 30.
fn roundings(largest: f64) -> f64 {
    30.0 * 30.0 * f64::EPSILON * largest
}

fn largest<'a>(values: impl IntoIterator<Item = &'a f64>) -> f64 {
    values.into_iter().fold(0.0, |largest: f64, value| largest.max(value.abs()))
}

#[test]
fn packed_document_logits_match_separate_document() {
    for model in models() {
        let subject = Subject::new(model, DType::F64);
        let logits = subject.logits(&host(), &packed());
        for rows in DOCUMENTS {
            let expected = subject.logits(&host(), &alone(rows.clone()));
            let bound = roundings(largest(&expected));
            let found = &logits[13 * rows.start..13 * rows.end];
            let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(found.len() == expected.len() && off <= bound, "{rows:?}: {off}, not {bound}");
        }
    }
}

#[test]
fn packed_training_matches_separate_documents() {
    for model in models() {
        let subject = Subject::new(model, DType::F64);
        for pass in [
            Pass::Train(Checkpointing::None),
            Pass::Train(Checkpointing::Full),
            Pass::Train(Checkpointing::Selective),
            Pass::Evaluate,
        ] {
            let got = subject.run(&packed(), pass);
            let parts = DOCUMENTS.map(|rows| subject.run(&alone(rows), pass));
            let loss: f64 = parts.iter().map(|part| part.loss).sum();
            assert!((got.loss - loss).abs() <= roundings(loss), "{} for {loss}", got.loss);
            assert_eq!(got.count, parts.iter().map(|part| part.count).sum::<u64>());
            // Gradients of biases of keys without rotation are zero but for roundings.
            let all = parts.iter().flat_map(|part| part.gradients.iter().flatten());
            let bound = roundings(largest(all));
            for (param, got) in got.gradients.iter().enumerate() {
                for (element, got) in got.iter().enumerate() {
                    let expected: f64 = parts.iter().map(|part| part.gradients[param][element]).sum();
                    let name = &subject.spec.params[param].fqn;
                    let off = (got - expected).abs();
                    assert!(off <= bound, "{name}[{element}]: {got} for {expected}");
                }
            }
        }
    }
}

#[test]
fn one_document_per_sample_matches_unpacked_bitwise() {
    for model in models() {
        let subject = Subject::new(model, DType::F32);
        let whole = batch(2, 7, 13);
        let positions = Some((0..14).map(|row| row % 7).collect());
        let one = Batch { positions, ..whole.clone() };
        assert_eq!(
            subject.run(&one, Pass::Train(Checkpointing::None)),
            subject.run(&whole, Pass::Train(Checkpointing::None))
        );
    }
}
