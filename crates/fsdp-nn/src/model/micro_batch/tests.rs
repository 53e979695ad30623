//! Plants faults in plans: the check finds all of them.

use std::sync::Arc;

use fsdp_core::DType;
use fsdp_core::model::ModelSpec;
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

use super::*;
use crate::backend::HeadChunks;
use crate::conformance::decoders::relatives;
use crate::conformance::models::{adapted, gpt2};
use crate::cuts::{Chunks, Cuts};
use crate::footprint::RunShape;
use crate::graph::Operand;
use crate::hf::HfModel;
use crate::model::{Decoder, DecoderConfig, Gpt2, Gpt2Config};
use crate::op::{Access, LossTerms, Op, Pointwise};

const PASSES: [Pass; 4] = [
    Pass::Train(Checkpointing::None),
    Pass::Train(Checkpointing::Full),
    Pass::Train(Checkpointing::Selective),
    Pass::Evaluate,
];

/// A plan with what it was made from.
struct Subject {
    name: String,
    plan: MicroBatchPlan,
    kinds: Kinds,
    spec: ModelSpec,
    pass: Pass,
    /// Number of planted faults.
    planted: usize,
}

impl Subject {
    fn all() -> Vec<Self> {
        let terms = LossTerms { z_loss: 1e-3, ..LossTerms::default() };
        let whole = RunShape {
            samples: 2,
            seq: 4,
            dtype: DType::Bf16,
            gradient_dtype: DType::F32,
            head_chunks: HeadChunks::Large,
            terms,
            packed: false,
            cuts: Cuts::WHOLE,
        };
        let decoder = |config: &DecoderConfig| Arc::new(Decoder::new(config).unwrap()) as HfModel;
        let config = Gpt2Config { embd_pdrop: 0.1, resid_pdrop: 0.1, ..gpt2() };
        let gpt2 = |dora| Arc::new(adapted(Gpt2::new(&config).unwrap(), 0.2, dora)) as HfModel;
        let mut models: Vec<_> = relatives().iter().map(|config| (decoder(config), whole)).collect();
        models.extend([false, true].map(|dora| (gpt2(dora), whole)));
        let half = Chunks { count: 2, first: 0, here: 1 };
        let chunked = RunShape { cuts: Cuts { samples: half, ..Cuts::WHOLE }, ..whole };
        let cut = relatives().into_iter().take(3);
        models.extend(cut.map(|config| (decoder(&config), chunked)));
        let divided = RunShape { cuts: Cuts { experts: half, ..Cuts::WHOLE }, ..whole };
        let mixtures = relatives()
            .into_iter()
            .filter(|config| config.layers.iter().any(|layer| layer.mixture.is_some()));
        models.extend(mixtures.map(|config| (decoder(&config), divided)));
        let mut all = Vec::new();
        let passes = models.iter().flat_map(|of| PASSES.map(|pass| (of, pass)));
        for ((model, shape), pass) in passes {
            let spec = model.description().spec.clone();
            let name = format!("{:?} {pass:?}", spec.params[0].fqn);
            let kinds = Kinds::new(model, &spec, shape.of(pass)).unwrap();
            let (plan, kinds) = MicroBatchPlan::unchecked(kinds, &spec, pass);
            all.push(Self { name, plan, kinds, spec, pass, planted: 0 });
        }
        all
    }

    /// Edits a copy of the plan, whose check must then fail.
    fn plant(&mut self, what: &str, edit: impl FnOnce(&mut MicroBatchPlan)) {
        let mut plan = self.plan.clone();
        edit(&mut plan);
        assert_ne!(plan, self.plan, "{}: {what} changes nothing", self.name);
        let found = plan.check(&self.kinds, &self.spec, self.pass);
        assert!(found.is_err(), "{}: {what} is not found", self.name);
        self.planted += 1;
    }

    /// Edits the operations of one call.
    fn plant_in(&mut self, call: usize, what: &str, edit: impl FnOnce(&mut List)) {
        let block = self.plan.calls[call].call;
        self.plant(&format!("{what} in {block:?}"), |plan| edit(plan.calls[call].list_mut()));
    }
}

impl PlannedCall {
    fn list_mut(&mut self) -> &mut List {
        let call = self.call;
        let plan = Arc::make_mut(&mut self.plan);
        match (&mut plan.backward, call) {
            (Some(backward), BlockCall::Backward(_)) => &mut backward.list,
            _ => &mut plan.forward,
        }
    }
}

/// The operands of a step that can be exchanged: reads, then writes.
fn operands(list: &mut List, step: usize) -> Vec<&mut Operand> {
    let call = &mut list.steps[step].call;
    call.reads.iter_mut().chain(call.writes.iter_mut().map(|(operand, _)| operand)).collect()
}

/// Whether the exchange of two operands changes nothing.
fn is_neutral(op: &Op, reads: usize, [first, second]: [usize; 2]) -> bool {
    let is_sum = matches!(op, Op::Pointwise(Pointwise::Add { .. })) && second < reads;
    let writes = op.describe().writes;
    let is_scratch = |index: usize| index >= reads && writes[index - reads].access == Access::Scratch;
    is_sum || (is_scratch(first) && is_scratch(second))
}

#[test]
fn exchanged_operands_are_found() {
    for mut subject in Subject::all() {
        for call in 0..subject.plan.calls.len() {
            let list = subject.plan.calls[call].list().clone();
            for (index, step) in list.steps.iter().enumerate() {
                let reads = step.call.reads.len();
                let count = reads + step.call.writes.len();
                for (first, second) in
                    (0..count).flat_map(|first| (0..first).map(move |other| (other, first)))
                {
                    let mut copy = list.clone();
                    let pair = operands(&mut copy, index);
                    if pair[first] == pair[second] || is_neutral(&step.call.op, reads, [first, second]) {
                        continue;
                    }
                    let what = format!("exchange of {first} and {second} of {:?}", step.call);
                    subject.plant_in(call, &what, |list| {
                        let mut pair = operands(list, index);
                        let (before, after) = pair.split_at_mut(second);
                        std::mem::swap(before[first], after[0]);
                    });
                }
            }
        }
        assert!(subject.planted > 50, "{}: {}", subject.name, subject.planted);
    }
}

#[test]
fn lost_and_doubled_operations_are_found() {
    for mut subject in Subject::all() {
        for call in 0..subject.plan.calls.len() {
            let steps = subject.plan.calls[call].list().steps.len();
            for index in 0..steps {
                if index + 1 < steps {
                    subject.plant_in(call, &format!("loss of operation {index}"), |list| {
                        let lost = list.steps.remove(index);
                        list.steps[index].begins.extend(lost.begins);
                        list.steps[index].arrivals.extend(lost.arrivals);
                        list.steps[index].ends.extend(lost.ends);
                    });
                }
                subject.plant_in(call, &format!("second operation {index}"), |list| {
                    let mut second = list.steps[index].clone();
                    second.begins.clear();
                    list.steps[index].arrivals.clear();
                    list.steps[index].ends.clear();
                    list.steps.insert(index + 1, second);
                });
            }
        }
        assert!(subject.planted > 20, "{}: {}", subject.name, subject.planted);
    }
}

#[test]
fn wrong_lives_of_places_are_found() {
    for mut subject in Subject::all() {
        for call in 0..subject.plan.calls.len() {
            let list = subject.plan.calls[call].list().clone();
            for (index, step) in list.steps.iter().enumerate() {
                for &place in &step.ends {
                    subject.plant_in(call, &format!("place {place} never ends"), |list| {
                        list.steps[index].ends.retain(|id| *id != place);
                        list.steps[index].begins.push(place);
                    });
                    if index > 0 && !step.begins.contains(&place) {
                        subject.plant_in(call, &format!("place {place} ends early"), |list| {
                            list.steps[index].ends.retain(|id| *id != place);
                            list.steps[index - 1].ends.push(place);
                        });
                    }
                }
                for &place in &step.begins {
                    subject.plant_in(call, &format!("place {place} never begins"), |list| {
                        list.steps[index].begins.retain(|id| *id != place);
                    });
                }
            }
        }
        assert!(subject.planted > 20, "{}: {}", subject.name, subject.planted);
    }
}

#[test]
fn late_and_lost_arrivals_are_found() {
    let (mut arrivals, mut beside) = (0, 0);
    for mut subject in Subject::all() {
        for call in 0..subject.plan.calls.len() {
            let list = subject.plan.calls[call].list().clone();
            for (index, step) in list.steps.iter().enumerate() {
                for &place in &step.arrivals {
                    subject.plant_in(call, &format!("place {place} never arrives"), |list| {
                        list.steps[index].arrivals.retain(|id| *id != place);
                    });
                    if index + 1 < list.steps.len() {
                        subject.plant_in(call, &format!("place {place} arrives late"), |list| {
                            list.steps[index].arrivals.retain(|id| *id != place);
                            list.steps[index + 1].arrivals.push(place);
                        });
                    }
                    arrivals += 1;
                    beside += usize::from(!step.call.writes_to(place));
                }
            }
        }
    }
    assert!(arrivals > 20 && beside > 10, "{beside} of {arrivals} run beside other calls");
}

#[test]
fn wrong_values_between_calls_are_found() {
    for mut subject in Subject::all() {
        for call in 0..subject.plan.calls.len() {
            let planned = subject.plan.calls[call].clone();
            for index in 0..planned.unread.len() {
                subject.plant("an unread value is left", |plan| {
                    plan.calls[call].unread.remove(index);
                });
            }
            for index in 0..planned.outputs.len() {
                subject.plant("a value is lost", |plan| {
                    plan.calls[call].outputs.remove(index);
                });
            }
            for (index, input) in planned.inputs.iter().enumerate() {
                let at = format!("{:?}", planned.call);
                // A second forward passes on what only backward reads.
                if input.is_last || planned.list().steps.iter().any(|step| step.call.accesses(input.place)) {
                    subject.plant(&format!("no input {index} of {at}"), |plan| {
                        plan.calls[call].inputs.remove(index);
                    });
                }
                subject.plant(&format!("end of input {index} of {at}"), |plan| {
                    let is_last = &mut plan.calls[call].inputs[index].is_last;
                    *is_last = !*is_last;
                });
                if !planned.list().steps.iter().any(|step| step.call.accesses(input.place)) {
                    continue;
                }
                for other in (0..subject.plan.values).filter(|&other| other != input.value) {
                    subject.plant(&format!("value {other} as input {index} of {at}"), |plan| {
                        plan.calls[call].inputs[index].value = other;
                    });
                }
            }
        }
    }
}
