//! Compares computation in blocks with computation of the whole.

use std::sync::Arc;

use fsdp_nn::conformance::host;
use fsdp_nn::{HostMemory, random};
use tch::Device;

use super::*;
use crate::torch::{Kernels, set_intra_op};

/// Grouped queries, an odd number of positions, heads of an odd size.
const ODD: AttentionDims = AttentionDims { batch: 3, seq: 13, heads: 6, kv_heads: 3, head_dim: 5 };
/// All matrices have libtorch's alignment; with another alignment, products may have other bits.
const ALIGNED: AttentionDims = AttentionDims { seq: 32, head_dim: 16, ..ODD };
const KEYS: [u64; 3] = [11, 7, u64::MAX];
const DROPPED: f64 = 0.3;

fn torch() -> Torch<HostMemory> {
    Torch::new(Arc::new(host()), Kernels::Aten)
}

fn composed(
    torch: &Torch<HostMemory>,
    dims: AttentionDims,
    scores_max: usize,
    drops: bool,
) -> Composed<'_, HostMemory> {
    let scores = Scores { dropout: if drops { DROPPED } else { 0.0 }, ..Scores::default() };
    Composed { scores_max, ..Composed::new(torch, dims, (scores, BatchFacts::with_keys(&KEYS))) }
}

fn numbers(key: u64, dims: AttentionDims, heads: usize) -> Tensor {
    let sizes = [dims.batch, heads, dims.seq, dims.head_dim];
    let len = sizes.iter().product::<usize>() as u64;
    let numbers: Vec<f64> = (0..len).map(|i| random::uniform(key, i) * 2.0 - 1.0).collect();
    Tensor::from_slice(&numbers).view(sizes.map(int).as_slice())
}

/// Output, log-sum-exp, and gradients, for operands of magnitude up to 1.
fn computed(dims: AttentionDims, scores_max: usize, drops: bool, kind: Kind) -> Vec<Tensor> {
    let torch = torch();
    let call = composed(&torch, dims, scores_max, drops);
    let AttentionDims { batch, seq, heads, kv_heads, .. } = dims;
    let [q, k, v, dy] = [(1, heads), (2, kv_heads), (3, kv_heads), (4, heads)]
        .map(|(key, heads)| numbers(key, dims, heads).to_kind(kind));
    let [y, dq] = [q.empty_like(), q.empty_like()];
    let [dk, dv] = [k.empty_like(), k.empty_like()];
    let sizes = [batch, heads, seq].map(int);
    let lse = Tensor::empty(sizes, (arithmetic(&q).expect("a float"), Device::Cpu));
    call.forward([&q, &k, &v], [&y, &lse]).expect("sizes that fit");
    call.backward([&q, &k, &v], [&y, &lse, &dy], [&dq, &dk, &dv]).expect("sizes that fit");
    vec![y, lse, dq, dk, dv]
}

fn blocks(scores_max: usize) -> Vec<Block> {
    let torch = torch();
    let call = composed(&torch, ODD, scores_max, false);
    call.spans().flat_map(|span| call.blocks(span)).collect()
}

/// Bounds that split nothing, samples (evenly and not), groups (evenly and not), and positions.
fn bounds(dims: AttentionDims) -> [usize; 9] {
    let AttentionDims { seq, heads, kv_heads, .. } = dims;
    let (of_group, of_sample) = (heads / kv_heads * seq * seq, heads * seq * seq);
    [
        SCORES_MAX,
        2 * of_sample,
        of_sample,
        of_sample - 1,
        of_group,
        of_group - 1,
        of_group / 2,
        of_group / 5,
        1,
    ]
}

#[test]
fn blocks_cover_each_query_once_within_score_limit() {
    let group = ODD.heads / ODD.kv_heads;
    let mut counts = Vec::new();
    for scores_max in bounds(ODD) {
        let blocks = blocks(scores_max);
        let mut seen = Vec::new();
        for Block { samples, groups, rows, .. } in blocks.clone() {
            let scores = samples.len() * groups.len() * group * rows.len() * ODD.seq;
            assert!(scores <= scores_max || rows.len() == 1, "{scores} scores, at most {scores_max}");
            for sample in samples {
                let of_sample = groups.clone().flat_map(|at| rows.clone().map(move |row| (sample, at, row)));
                seen.extend(of_sample);
            }
        }
        seen.sort_unstable();
        let all = (0..ODD.batch).flat_map(|sample| {
            (0..ODD.kv_heads).flat_map(move |at| (0..ODD.seq).map(move |row| (sample, at, row)))
        });
        assert!(seen.into_iter().eq(all), "every query of every group once");
        counts.push(blocks.len());
    }
    assert_eq!(counts, [1, 2, 3, 6, 9, 18, 27, 63, 117]);
}

#[test]
fn splitting_by_sample_and_head_is_bitwise_exact() {
    set_intra_op(1);
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
        for drops in [false, true] {
            let whole = computed(ALIGNED, SCORES_MAX, drops, kind);
            for scores_max in &bounds(ALIGNED)[1..5] {
                let parts = computed(ALIGNED, *scores_max, drops, kind);
                assert!(
                    whole.iter().zip(&parts).all(|(whole, part)| whole.equal(part)),
                    "{kind:?}, {scores_max}"
                );
            }
        }
    }
}

/// Products of matrices at other addresses, or with fewer rows, may be summed in another order. With operands up to 1,
/// scores and slopes are up to `dim^1/2` and `dim`, and are sums of `dim` products; exponents are then off by at most
/// `2 (dim + seq + 16) dim^1/2` roundings, which each probability inherits as a relative error. Gradients of scores are
/// products of a probability, at most twice a slope over the probability of keeping, and a scale; sums over rows have
/// `group x seq` terms of up to that size.
#[test]
fn odd_sized_blocks_stay_within_reordered_sum_bound() {
    let (dim, seq) = (ODD.head_dim as f64, ODD.seq as f64);
    let terms = (ODD.heads / ODD.kv_heads) as f64 * seq;
    let relative = 2.0 * (dim + seq + 16.0) * dim.sqrt() + terms + 16.0;
    let slope = 2.0 * dim / (1.0 - DROPPED) / dim.sqrt();
    let bound = 2.0 * f64::EPSILON * relative * terms * slope;
    for drops in [false, true] {
        let whole = computed(ODD, SCORES_MAX, drops, Kind::Double);
        for scores_max in &bounds(ODD)[1..] {
            for (whole, part) in whole.iter().zip(computed(ODD, *scores_max, drops, Kind::Double)) {
                let off = (whole - part).abs().max().double_value(&[]);
                assert!(off <= bound, "{off}, not {bound}, with at most {scores_max} scores");
            }
        }
    }
}

#[test]
fn block_dropout_factors_match_complete_samples() {
    let torch = torch();
    let AttentionDims { seq, heads, kv_heads, .. } = ODD;
    let whole = factors(Dropout { p: DROPPED, keys: &KEYS }, &[0; 3], heads * seq * seq).expect("memory");
    let whole = whole.view([ODD.batch, heads, seq, seq].map(int).as_slice());
    for scores_max in bounds(ODD) {
        let call = composed(&torch, ODD, scores_max, true);
        for block in blocks(scores_max) {
            let of_block = part(&block.of_heads(&whole, heads / kv_heads).expect("a part"), 2, &block.rows);
            let expected = part(&of_block.expect("a part"), 3, &block.keys).expect("a part");
            let sizes = [block.samples.len(), block.groups.len()].map(int);
            let rows = int(heads / kv_heads * block.rows.len());
            let mut got =
                Tensor::ones([sizes[0], sizes[1], rows, int(block.keys.len())], (Kind::Double, Device::Cpu));
            let made = call.factors(&block, Kind::Double).expect("memory").expect("there is dropout");
            made.multiply(&call, &block, &mut got).expect("sizes that fit");
            assert!(got.view_as(&expected).equal(&expected), "{block:?}");
        }
    }
}
