//! Tests which products a recomputation executes, and the memory cost of avoiding them.

use std::collections::BTreeMap;

use fsdp_core::DType;
use fsdp_core::program::{BlockCall, ForwardMode, Pass};
use fsdp_core::schedule::Checkpointing;

use super::harness::{freeze, gpt2, llama, small};
use crate::backend::HeadChunks;
use crate::cuts::Cuts;
use crate::footprint::{RunShape, footprints};
use crate::listing::listings;
use crate::model::{Architecture, Decoder, Gpt2, Gpt2Config};
use crate::op::{Attention, Linear, LossTerms, Op};

const CHECKPOINTING: [Pass; 2] = [Pass::Train(Checkpointing::Full), Pass::Train(Checkpointing::Selective)];

/// Measurements of one pass of a model.
#[derive(Default)]
struct Observed {
    /// Number of forward linear maps and attentions by mode, over all layers.
    products: BTreeMap<&'static str, usize>,
    /// Bytes of activations between forward and backward, without the data of the step.
    kept: usize,
}

fn observe<A: Architecture>(architecture: &A, frozen: &[&str], pass: Pass, dtype: DType) -> Observed {
    let mut spec = architecture.description().spec.clone();
    freeze(&mut spec, frozen);
    let head_chunks = HeadChunks::Small;
    let (gradient_dtype, terms) = (dtype.master(), LossTerms::default());
    let shape = RunShape {
        samples: 2,
        seq: 7,
        dtype,
        gradient_dtype,
        head_chunks,
        terms,
        packed: false,
        cuts: Cuts::WHOLE,
    };
    let mut observed = Observed::default();
    let mut live = 0;
    let footprints = footprints(architecture, &spec, shape, pass).unwrap();
    let listings = listings(architecture, &spec, shape, pass).unwrap();
    for ((call, listing), footprint) in listings.into_iter().zip(footprints.calls) {
        let made = listing.list.steps.iter().filter(|step| is_product(&step.call.op)).count();
        match call {
            BlockCall::ForwardBackward(_) => observed.kept = live,
            BlockCall::Forward(_, ForwardMode::Recompute) => {
                *observed.products.entry("replay").or_default() += made
            }
            BlockCall::Forward(..) => *observed.products.entry("forward").or_default() += made,
            _ => {}
        }
        live = footprint.after(live);
    }
    observed
}

/// Whether an operation is a linear map or attention, forward.
fn is_product(op: &Op) -> bool {
    matches!(op, Op::Linear(Linear::Forward { .. }) | Op::Attention(Attention::Forward { .. }))
}

fn products<A: Architecture + Clone>(architecture: &A, frozen: &[&str]) -> [[usize; 2]; 2] {
    CHECKPOINTING.map(|pass| {
        let observed = observe(architecture, frozen, pass, DType::F32);
        ["forward", "replay"].map(|mode| observed.products.get(mode).copied().unwrap_or(0))
    })
}

#[test]
fn recomputation_skips_kept_and_unread_products() {
    // Two layers, each with a linear map for queries, keys and values, one after attention, two in the MLP; and
    // attention.
    assert_eq!(products(&Gpt2::new(&gpt2()).unwrap(), &[]), [[10, 8], [10, 0]]);
    // The same with separate maps for queries, keys, values and gates.
    assert_eq!(products(&Decoder::new(&llama()).unwrap(), &[]), [[16, 14], [16, 0]]);
    // The last operation of a layer reads the output of the linear map.
    assert_eq!(products(&small(), &[]), [[2, 2], [2, 0]]);
    // Below the first trained layer nothing is recomputed.
    let untied = Gpt2::new(&Gpt2Config { tie_word_embeddings: false, ..gpt2() }).unwrap();
    assert_eq!(products(&untied, &["wte", "wpe", "h.0."]), [[10, 4], [10, 0]]);
}

/// Checks the table of docs/memory.md, per row.
#[test]
fn selective_checkpointing_drops_only_norm_statistics() {
    let rows = 2 * 7;
    for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F64] {
        let (value, statistic) = (dtype.size_bytes(), dtype.master().size_bytes());
        let kept = |architecture: &dyn Fn(Pass) -> Observed| {
            [
                Pass::Train(Checkpointing::None),
                Pass::Train(Checkpointing::Selective),
                Pass::Train(Checkpointing::Full),
            ]
            .map(|pass| {
                let kept = architecture(pass).kept;
                // The output of the last layer stays live.
                (kept - rows * 12 * value) / rows
            })
        };
        let model = Decoder::new(&llama()).unwrap();
        let (hidden, inner, packed, mixed, heads) = (12, 10, 48, 24, 4);
        let products = value * (packed + mixed + hidden + 2 * inner) + statistic * heads;
        let [none, selective, full] = kept(&|pass| observe(&model, &[], pass, dtype));
        assert_eq!(full, 2 * value * hidden);
        assert_eq!(selective, full + 2 * products);
        assert_eq!(none, selective + 2 * 2 * statistic);
        let model = Gpt2::new(&gpt2()).unwrap();
        let (inner, packed, heads) = (20, 36, 3);
        let products = value * (packed + hidden + hidden + inner) + statistic * heads;
        let [none, selective, full] = kept(&|pass| observe(&model, &[], pass, dtype));
        assert_eq!(full, 2 * value * hidden);
        assert_eq!(selective, full + 2 * products);
        assert_eq!(none, selective + 2 * 2 * 2 * statistic);
    }
}
