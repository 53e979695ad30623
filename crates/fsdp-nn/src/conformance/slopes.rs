//! Gradients in `f64` against central differences of the loss, for a model of each kind with all its dropouts
//! (the masks are functions of counters, so they stay put) and for one that makes the tape do odd things.

use fsdp_core::model::BlockId;
use fsdp_core::{DType, Error};

use super::Subject;
use super::models::{Sample, batch, hf_models, small};
use crate::backend::{Backend, IGNORED_TARGET};
use crate::layer::{Describe, Description, Embedding, Head, LayerNorm, Linear, RmsNorm};
use crate::model::Architecture;
use crate::model::unsharded::Pass;
use crate::tape::{Tape, Tensor};

/// Compares some elements of every gradient.
fn check<M: Backend, A: Architecture + Clone>(subject: &Subject<'_, M>, mut sample: Sample<A>) {
    const STEP: f64 = 1e-5;
    let mut batch = batch(3, 7, 13);
    batch.targets[4] = IGNORED_TARGET;
    let gradients = sample.run_on(&(subject.memory)(), &batch, Pass::Train).gradients;
    for (param, gradient) in gradients.iter().enumerate() {
        let len = gradient.len();
        for element in (0..len).step_by(len.div_ceil(5)) {
            let original = sample.values[param][element];
            let mut loss_at = |value| {
                sample.values[param][element] = value;
                sample.run_on(&(subject.memory)(), &batch, Pass::TrainRecomputing).loss
            };
            let slope = (loss_at(original + STEP) - loss_at(original - STEP)) / (2.0 * STEP);
            loss_at(original);
            let got = gradient[element];
            let name = &sample.spec.params[param].fqn;
            assert!((got - slope).abs() < 1e-6 * (1.0 + slope.abs()), "{name}[{element}]: {got} not {slope}");
        }
    }
}

/// Gradients of a Llama, a GPT-2, an MLP and a model that uses values several times are slopes of the loss, in double
/// precision and with all dropouts.
///
/// # Panics
/// When one is not.
pub fn gradients_of_models_are_slopes<M: Backend>(subject: &Subject<'_, M>) {
    for model in hf_models() {
        check(subject, Sample::new(model, DType::F64));
    }
    check(subject, Sample::new(small(), DType::F64));
    check(subject, Sample::new(Odd::new(), DType::F64));
}

/// A model whose block uses values several times, in place and not, kept and computed again.
#[derive(Clone)]
struct Odd {
    description: Description,
    embedding: Embedding,
    norm: RmsNorm,
    other: LayerNorm,
    wide: Linear,
    back: Linear,
    head: Head,
}

impl Odd {
    fn new() -> Self {
        let mut d = Describe::new("Odd", 0.4);
        let embedding = d.embedding("embed", 13, 6);
        let norm = d.rms_norm("norm", "Norm", 6, 1e-5);
        let other = d.layer_norm("other", 6, 1e-5);
        let wide = d.linear("wide", 6, 5, true);
        let back = d.linear("back", 5, 6, false);
        let head = d.head("head", 6, 13, None);
        d.block("embedding", None, &[&embedding]);
        d.block("identity", None, &[]);
        d.block("odd", Some(0), &[&norm, &other, &wide, &back]);
        d.block("head", None, &[&norm, &head]);
        Self { description: d.finish().unwrap(), embedding, norm, other, wide, back, head }
    }
}

impl Architecture for Odd {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.head
    }

    fn first<M: Backend>(&self, tape: &mut Tape<'_, M>) -> Result<Tensor<M>, Error> {
        tape.embedding(&self.embedding)
    }

    fn middle<M: Backend>(
        &self,
        block: BlockId,
        tape: &mut Tape<'_, M>,
        x: Tensor<M>,
    ) -> Result<Tensor<M>, Error> {
        if block == BlockId(1) {
            return Ok(x);
        }
        // Dropout of a value that is used again must not change it, nor what a norm computes again.
        let h = tape.rms_norm(x.clone(), &self.norm)?;
        let dropped = tape.dropout(h.clone(), 0.3)?;
        let g = tape.gelu(h.clone())?;
        let [a, b] = tape.linear_pair(g.clone(), &self.wide, &self.wide)?;
        let gated = tape.swiglu(a.clone(), b)?;
        let y = tape.linear(gated.clone(), &self.back)?;
        let z = tape.linear(a, &self.back)?;
        let unused = tape.layer_norm(z.clone(), &self.other)?;
        drop(unused);
        let doubled = tape.add(x.clone(), x)?;
        let doubled = tape.dropout(doubled, 0.2)?;
        let sum = tape.add(y, dropped)?;
        let sum = tape.add(sum.clone(), sum)?;
        let sum = tape.add(sum, z)?;
        let sum = tape.layer_norm(sum, &self.other)?;
        let sum = tape.gelu(sum)?;
        let sum = tape.add(h, sum)?;
        let sum = tape.add(sum, g)?;
        tape.add(sum, doubled)
    }

    fn last<M: Backend>(&self, tape: &mut Tape<'_, M>, x: Tensor<M>) -> Result<Tensor<M>, Error> {
        let h = tape.rms_norm(x.clone(), &self.norm)?;
        tape.add(h, x)
    }
}
