//! Tests which products a recomputation executes, and the memory cost of avoiding them.

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::memory::Category;
use fsdp_core::model::BlockId;
use fsdp_core::program::{BlockCall, ForwardMode, Pass, calls};
use fsdp_core::schedule::Checkpointing;
use fsdp_core::{DType, Error};

use super::harness::{Subject, batch, freeze, gpt2, host, llama, small};
use crate::accounting::{Account, Lease};
use crate::backend::HeadChunks;
use crate::footprint::RunShape;
use crate::graph::{self, Counting, Decl, Runner};
use crate::model::unsharded::make;
use crate::model::{Architecture, Blocks, Decoder, Gpt2, Gpt2Config};
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

/// A [`Runner`] that counts memory and the linear maps and attentions of forward.
struct Counter {
    counting: Counting,
    products: usize,
}

impl Runner for Counter {
    type Handle = Arc<Lease>;

    fn allocate(&mut self, decl: &Decl) -> Result<Arc<Lease>, Error> {
        self.counting.allocate(decl)
    }

    fn run(&mut self, call: &graph::Call, _places: &mut [Option<Arc<Lease>>]) -> Result<(), Error> {
        self.products += usize::from(matches!(
            call.op,
            Op::Linear(Linear::Forward { .. }) | Op::Attention(Attention::Forward { .. })
        ));
        Ok(())
    }
}

fn observe<A: Architecture + Clone>(architecture: &A, frozen: &[&str], pass: Pass, dtype: DType) -> Observed {
    let mut spec = architecture.description().spec.clone();
    freeze(&mut spec, frozen);
    let account = Arc::<Account>::default();
    let mut counter = Counter { counting: Counting(Arc::clone(&account)), products: 0 };
    let mut blocks: Blocks<A, Arc<Lease>> = Blocks::new(architecture.clone(), spec.clone());
    let head_chunks = HeadChunks::Small;
    let (gradient_dtype, terms) = (dtype.master(), LossTerms::default());
    let shape = RunShape { samples: 2, seq: 7, dtype, gradient_dtype, head_chunks, terms, packed: false };
    let mut observed = Observed::default();
    for call in calls(&spec, pass) {
        if matches!(call, BlockCall::ForwardBackward(_)) {
            observed.kept = account.usage().live(Category::Activation);
        }
        counter.products = 0;
        blocks.call(call, shape.of(call), &mut counter).unwrap();
        let made = counter.products;
        match call {
            BlockCall::Forward(_, ForwardMode::Recompute) => {
                *observed.products.entry("replay").or_default() += made
            }
            BlockCall::Forward(..) => *observed.products.entry("forward").or_default() += made,
            _ => {}
        }
    }
    observed
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

#[test]
fn recomputation_without_forward_is_rejected() {
    let subject = Subject::new(Gpt2::new(&gpt2()).unwrap(), DType::F32);
    let memory = host();
    let mut program = subject.program();
    program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
    let mut params = subject.whole(&memory).params();
    let mut gradients = subject.open_gradients(&memory);
    let mut make = |call: BlockCall| make(&mut program, &memory, call, &mut params, &mut gradients);
    for call in [
        BlockCall::Forward(BlockId(0), ForwardMode::Record),
        BlockCall::Forward(BlockId(1), ForwardMode::Record),
    ] {
        make(call).unwrap();
    }
    let error = make(BlockCall::Forward(BlockId(2), ForwardMode::Recompute)).unwrap_err();
    assert!(matches!(&error, Error::Program { .. }), "{error}");
    assert!(error.to_string().contains("a forward to replay"), "{error}");
}
