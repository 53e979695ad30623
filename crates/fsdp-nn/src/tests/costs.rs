//! Tests costs against naive loops that count, and against closed forms of whole steps.

use fsdp_core::DType;

use super::harness::{freeze, gpt2, llama};
use crate::backend::HeadChunks;
use crate::cuts::Cuts;
use crate::footprint::RunShape;
use crate::listing::listings;
use crate::model::{Architecture, Decoder, DecoderConfig, Gpt2, Gpt2Config, Kinds};
use crate::op::{
    AdaptedDims, Attention, AttentionDims, Cost, Dora, Head, HeadDims, Linear, LinearDims, Lookup, LossTerms,
    Norm, Op, Orientation, Pointwise, Scores,
};
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

const SHAPE: RunShape = RunShape {
    samples: 2,
    seq: 7,
    dtype: DType::Bf16,
    gradient_dtype: DType::F32,
    head_chunks: HeadChunks::Small,
    terms: LossTerms {
        label_smoothing: 0.0,
        z_loss: 0.0,
        router_loss: 0.0,
        router_z_loss: 0.0,
        router_sequence_loss: 0.0,
        loss_scale: 1.0,
    },
    packed: false,
    cuts: Cuts::WHOLE,
};

fn products(op: &Op) -> u64 {
    op.cost(DType::F32, DType::F32).product_flops
}

/// Counts the multiply-adds of a product one by one.
fn multiply(m: usize, n: usize, k: usize) -> u64 {
    let mut count = 0;
    (0..m).for_each(|_| (0..n).for_each(|_| (0..k).for_each(|_| count += 1)));
    count
}

/// Counts the multiply-adds of causal attention: every query with the keys that it sees, with `products` per element.
fn attend(dims: AttentionDims, products: u64) -> u64 {
    let mut count = 0;
    for _sample_and_head in 0..dims.batch * dims.heads {
        for query in 0..dims.seq {
            for _key in 0..=query {
                (0..dims.head_dim).for_each(|_| count += products);
            }
        }
    }
    count
}

#[test]
fn products_cost_two_flops_per_inner_iteration() {
    for (rows, inputs, outputs) in [(1, 1, 1), (3, 5, 2), (7, 4, 9)] {
        let dims = LinearDims { rows, inputs, outputs, y_stride: outputs, orientation: Orientation::OutIn };
        let counted = 2 * multiply(rows, outputs, inputs);
        for op in [
            Op::Linear(Linear::Forward { dims, bias: true }),
            Op::Linear(Linear::BackwardInput { dims }),
            Op::Linear(Linear::BackwardWeight { dims }),
        ] {
            assert_eq!(products(&op), counted, "{op:?}");
        }
        let dims = AdaptedDims { inputs, outputs, rank: rows, scale: 0.5, orientation: Orientation::InOut };
        assert_eq!(products(&Op::Dora(Dora::Norms { dims })), counted);
        let dims = HeadDims::new([rows, inputs, outputs], 2);
        assert_eq!(products(&Op::Head(Head::Loss { dims })), counted);
        assert_eq!(
            products(&Op::Head(Head::LossBackward { dims, weight: true, is_rounded: false })),
            3 * counted
        );
        assert_eq!(
            products(&Op::Head(Head::LossBackward { dims, weight: false, is_rounded: false })),
            2 * counted
        );
    }
    for (seq, heads, kv_heads) in [(1, 1, 1), (5, 4, 2), (8, 3, 3)] {
        let dims = AttentionDims { batch: 2, seq, heads, kv_heads, head_dim: 6 };
        // Scores and weighted values; then scores again, and gradients of probabilities, queries, keys and values.
        assert_eq!(
            products(&Op::Attention(Attention::Forward { dims, scores: Scores::default() })),
            2 * attend(dims, 2)
        );
        assert_eq!(
            products(&Op::Attention(Attention::Backward { dims, scores: Scores::default() })),
            2 * attend(dims, 5)
        );
    }
}

#[test]
fn cost_bytes_match_operands() {
    let dims = LinearDims { rows: 3, inputs: 5, outputs: 2, y_stride: 9, orientation: Orientation::OutIn };
    let of = |op: &Op| {
        let Cost { bytes_read, bytes_written, .. } = op.cost(DType::Bf16, DType::F32);
        (bytes_read, bytes_written)
    };
    // Only the block of columns counts, not the whole row.
    assert_eq!(of(&Op::Linear(Linear::Forward { dims, bias: true })), (2 * (15 + 10 + 2), 2 * 6));
    assert_eq!(of(&Op::Linear(Linear::BackwardWeight { dims })), (2 * (15 + 6), 4 * 10));
    // Only the rows that are looked up count, not the table; ids are 4 bytes.
    assert_eq!(
        of(&Op::Lookup(Lookup::Embedding { rows: 3, width: 4, table_rows: 100, padding: None })),
        (3 * 4 + 2 * 12, 2 * 12)
    );
    assert_eq!(
        of(&Op::Norm(Norm::Rms { rows: 3, width: 4, eps: 1e-5, offset: 0.0 })),
        (2 * (12 + 4), 2 * 12 + 4 * 3)
    );
    let dims = AdaptedDims { inputs: 5, outputs: 2, rank: 3, scale: 0.5, orientation: Orientation::OutIn };
    assert_eq!(of(&Op::Dora(Dora::Norms { dims })), (2 * (10 + 15 + 6), 2 * 2));
    assert_eq!(of(&Op::Dora(Dora::Rescale { rows: 3, width: 4, bias: true })), (2 * (12 + 3 * 4), 2 * 12));
    assert_eq!(
        of(&Op::Dora(Dora::RescaleBackward { rows: 3, width: 4 })),
        (2 * (12 + 2 * 4 + 12), 2 * 12 + 4 * 4)
    );
    // In place: both read and written.
    assert_eq!(of(&Op::Pointwise(Pointwise::Dropout { len: 12, samples: 3, p: 0.5 })), (24, 24));
}

fn step<A: Architecture + Clone>(architecture: &A, frozen: &[&str], pass: Pass) -> u64 {
    let mut spec = architecture.description().spec.clone();
    freeze(&mut spec, frozen);
    let listings = listings(architecture, &spec, SHAPE, pass).unwrap();
    listings.iter().map(|(_, listing)| listing.cost(SHAPE).product_flops).sum()
}

/// Number of elements in the parameters that are multiplied: matrices, except tables that are only looked up.
fn multiplied(architecture: &impl Architecture, tables: &[&str]) -> u64 {
    let params = &architecture.description().spec.params;
    let matrices =
        params.iter().filter(|param| param.shape.len() == 2 && !tables.contains(&param.fqn.as_str()));
    matrices.map(|param| param.len() as u64).sum()
}

/// The cost is `6 N + 12 L d T` per token, with these differences. `N` counts the elements of matrices in products
/// (neither norms nor biases, and the token table only if it is the head). Of the `T` keys a query sees `(T + 1) / 2`
/// on average. The backward of attention recomputes its scores, which gives 14 products of `d` per key instead of 12.
/// The first block passes no gradient on, which would cost no product.
#[test]
fn model_step_cost_matches_closed_form() {
    let tokens = 2 * 7;
    let attention = |layers: u64, width: u64| tokens * 14 * layers * width * (7 + 1) / 2;
    let tied = Decoder::new(&llama()).unwrap();
    let expected = 6 * multiplied(&tied, &[]) * tokens + attention(2, 24);
    assert_eq!(step(&tied, &[], Pass::Train(Checkpointing::None)), expected);
    let untied = Decoder::new(&DecoderConfig { tie_word_embeddings: false, ..llama() }).unwrap();
    let n = multiplied(&untied, &["model.embed_tokens.weight"]);
    assert_eq!(step(&untied, &[], Pass::Train(Checkpointing::None)), 6 * n * tokens + attention(2, 24));
    let gpt2 = Gpt2::new(&gpt2()).unwrap();
    let n = multiplied(&gpt2, &["transformer.wpe.weight"]);
    assert_eq!(step(&gpt2, &[], Pass::Train(Checkpointing::None)), 6 * n * tokens + attention(2, 12));
}

#[test]
fn recomputation_cost_matches_recomputed_operations() {
    let model = Decoder::new(&llama()).unwrap();
    let plain = step(&model, &[], Pass::Train(Checkpointing::None));
    // The outputs of products are kept.
    assert_eq!(step(&model, &[], Pass::Train(Checkpointing::Selective)), plain);
    // Each layer again, except its last linear map: 2 (its N - that of `down`) + 4 d T / 2.
    let (hidden, inner, tokens) = (12, 10, 14);
    let layer = hidden * (24 + 2 * 12) + 24 * hidden + 2 * hidden * inner;
    let recomputation = 2 * (2 * layer * tokens + tokens * 4 * 24 * (7 + 1) / 2);
    assert_eq!(step(&model, &[], Pass::Train(Checkpointing::Full)), plain + recomputation);
}

#[test]
fn frozen_parameters_add_no_gradient_flops() {
    let model = Decoder::new(&DecoderConfig { tie_word_embeddings: false, ..llama() }).unwrap();
    let frozen = step(&model, &["embed", "norm", "proj"], Pass::Train(Checkpointing::None));
    // Forward of everything, plus the three products of the head.
    let (tokens, head) = (14, 13 * 12);
    let layers = multiplied(&model, &["model.embed_tokens.weight", "lm_head.weight"]);
    assert_eq!(frozen, tokens * (2 * layers + 6 * head) + tokens * 2 * 4 * 24 * (7 + 1) / 2);
}

#[test]
fn identical_blocks_share_one_kind() {
    let config = Gpt2Config { n_layer: 80, tie_word_embeddings: false, ..gpt2() };
    let model = Gpt2::new(&config).unwrap();
    let spec = &model.description().spec;
    let kinds = Kinds::new(&model, spec, SHAPE.of(Pass::Train(Checkpointing::None))).unwrap();
    // The embedding, both halves of a layer, and the head.
    assert_eq!(kinds.len(), 4);
}
