//! Tests that operations on parameters which are kept in f32 compute in f32, and no others.

use fsdp_core::DType;
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

use super::harness::llama;
use crate::backend::HeadChunks;
use crate::cuts::Cuts;
use crate::footprint::RunShape;
use crate::graph::Step;
use crate::listing::{Listing, listings};
use crate::model::{Architecture, Decoder};
use crate::op::{LossTerms, Op, Pointwise};

/// The listings of a training step in 16 bits, with parameters in f32 whose names contain `kept`.
fn listed(kept: &str, checkpointing: Checkpointing) -> Vec<Listing> {
    let model = Decoder::new(&llama()).unwrap();
    let mut spec = model.description().spec.clone();
    spec.params.iter_mut().for_each(|param| param.keep_f32 = !kept.is_empty() && param.fqn.contains(kept));
    let shape = RunShape {
        samples: 2,
        seq: 7,
        dtype: DType::Bf16,
        gradient_dtype: DType::F32,
        head_chunks: HeadChunks::Small,
        terms: LossTerms::default(),
        packed: false,
        cuts: Cuts::WHOLE,
    };
    let listings = listings(&model, &spec, shape, Pass::Train(checkpointing)).unwrap();
    listings.into_iter().map(|(_, listing)| listing).collect()
}

/// The dtypes of the values that calls access, of those of which `is` holds.
fn dtypes(listings: &[Listing], is: impl Fn(&Op) -> bool) -> Vec<Vec<DType>> {
    let of = |listing: &Listing| {
        let steps = listing.list.steps.iter().filter(|step| is(&step.call.op));
        let dtypes = steps.map(|step| {
            let operands = step.call.reads.iter().chain(step.call.writes.iter().map(|(operand, _)| operand));
            operands.filter_map(|operand| Some(listing.places[operand.local()?].dtype)).collect()
        });
        dtypes.collect::<Vec<_>>()
    };
    listings.iter().flat_map(of).collect()
}

#[test]
fn operations_on_kept_parameters_see_values_in_f32() {
    let is_norm = |op: &Op| matches!(op, Op::Norm(_));
    let is_conversion = |op: &Op| matches!(op, Op::Pointwise(Pointwise::Convert { .. }));
    let is_other = |op: &Op| matches!(op, Op::Linear(_) | Op::Attention(_) | Op::Activation(_) | Op::Head(_));
    for checkpointing in [Checkpointing::None, Checkpointing::Full, Checkpointing::Selective] {
        let kept = listed("norm", checkpointing);
        let norms = dtypes(&kept, is_norm);
        assert!(!norms.is_empty() && norms.iter().flatten().all(|dtype| *dtype == DType::F32), "{norms:?}");
        let conversions = dtypes(&kept, is_conversion);
        assert!(conversions.iter().all(|pair| pair[0] != pair[1]), "{conversions:?}");
        // Other operations stay what they are.
        let none = listed("", checkpointing);
        assert_eq!(dtypes(&kept, is_other), dtypes(&none, is_other));
        assert!(dtypes(&none, is_conversion).is_empty());
    }
}

#[test]
fn what_is_converted_is_not_kept_for_backward() {
    let mut conversions = 0;
    for listing in listed("norm", Checkpointing::None) {
        let steps = &listing.list.steps;
        let ended: Vec<usize> = steps.iter().flat_map(|step| step.ends.iter().copied()).collect();
        let conversion = |step: &&Step| matches!(step.call.op, Op::Pointwise(Pointwise::Convert { .. }));
        for step in steps.iter().filter(conversion) {
            let written = step.call.writes[0].0.local().unwrap();
            conversions += 1;
            assert!(listing.places[written].dtype != DType::F32 || ended.contains(&written));
        }
    }
    assert!(conversions > 0);
}
