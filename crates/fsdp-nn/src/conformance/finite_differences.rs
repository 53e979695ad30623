//! Compares gradients in `f64` with central differences of the loss, for a model of each kind with all its dropouts
//! (whose masks are functions of counters, so they do not change) and for one that uses values in unusual ways.

use fsdp_core::model::{BlockId, ParamId};
use fsdp_core::{DType, Error};

use super::Subject;
use super::decoders::{mixtures, relatives};
use super::models::{Sample, adapted, batch, hf_models, packed_batch, small};
use crate::backend::{Backend, IGNORED_TARGET};
use crate::graph::{Builder, Tensor};
use crate::layer::{
    Adapter, Attention, Describe, Description, Embedding, Head, LayerNorm, Linear, RmsNorm, Rope,
};
use crate::model::{Architecture, Batch, Decoder};
use crate::op::{Function, Orientation};
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

/// Compares some elements of every gradient.
fn check<M: Backend, A: Architecture + Clone>(
    subject: &Subject<'_, M>,
    mut sample: Sample<A>,
    mut batch: Batch,
) {
    const STEP: f64 = 1e-5;
    batch.targets[4] = IGNORED_TARGET;
    let gradients = sample.run_on(&(subject.memory)(), &batch, Pass::Train(Checkpointing::None)).gradients;
    for (param, gradient) in gradients.iter().enumerate() {
        if !sample.spec.params[param].trainable {
            continue;
        }
        let len = gradient.len();
        for element in (0..len).step_by(len.div_ceil(5)) {
            let original = sample.values[param][element];
            let mut loss_at = |value| {
                sample.set(ParamId(param), element, value);
                sample.run_on(&(subject.memory)(), &batch, Pass::Train(Checkpointing::Full)).loss
            };
            let slope = (loss_at(original + STEP) - loss_at(original - STEP)) / (2.0 * STEP);
            loss_at(original);
            let got = gradient[element];
            let name = &sample.spec.params[param].fqn;
            assert!((got - slope).abs() < 1e-6 * (1.0 + slope.abs()), "{name}[{element}]: {got} not {slope}");
        }
    }
}

/// Checks that gradients of a Llama and its relatives, a GPT-2, an MLP, a model that uses values several times and a
/// model with every possible cap are derivatives of the loss, in double precision and with all dropouts, for plain
/// samples and for packed documents.
///
/// # Panics
/// If one is not.
pub fn model_gradients_match_finite_differences<M: Backend>(subject: &Subject<'_, M>) {
    for model in hf_models() {
        check(subject, Sample::new(model.clone(), DType::F64), batch(3, 7, 13));
        check(subject, Sample::new(model, DType::F64), packed_batch(3, 7, 13));
    }
    for relative in relatives() {
        let model = Decoder::new(&relative).unwrap();
        check(subject, Sample::new(model.clone(), DType::F64), batch(3, 7, 13));
        check(subject, Sample::new(model, DType::F64), packed_batch(3, 7, 13));
    }
    check(subject, Sample::new(small(), DType::F64), batch(3, 7, 13));
    check(subject, Sample::new(Odd::new(), DType::F64), batch(3, 7, 13));
    check(subject, Sample::new(Capped::new(), DType::F64), batch(3, 7, 13));
    check(subject, Sample::new(Capped::new(), DType::F64), packed_batch(3, 7, 13));
}

/// As [`model_gradients_match_finite_differences`], for frozen models with adapters on their linear maps and experts.
///
/// # Panics
/// If one is not.
pub fn adapter_gradients_match_finite_differences<M: Backend>(subject: &Subject<'_, M>) {
    for mixture in mixtures() {
        let model = adapted(Decoder::new(&mixture).unwrap(), 0.0, false);
        check(subject, Sample::new(model, DType::F64), batch(3, 7, 13));
    }
    for (dropout, dora) in [(0.0, false), (0.25, false), (0.0, true), (0.25, true)] {
        for model in hf_models() {
            check(subject, Sample::new(adapted(model, dropout, dora), DType::F64), batch(3, 7, 13));
        }
        check(subject, Sample::new(adapted(small(), dropout, dora), DType::F64), batch(3, 7, 13));
        check(subject, Sample::new(adapted(Odd::new(), dropout, dora), DType::F64), batch(3, 7, 13));
        check(subject, Sample::new(adapted(Capped::new(), dropout, dora), DType::F64), batch(3, 7, 13));
    }
}

impl<A: Architecture> Sample<A> {
    /// Changes an element. Gradients treat the lengths that rows have with an adapter as constants, so a change of these
    /// lengths is undone by the magnitudes.
    fn set(&mut self, param: ParamId, element: usize, value: f64) {
        let linears = &self.architecture.description().linears;
        let adapted = linears.iter().filter_map(|(_, linear)| {
            let adapter = self.architecture.description().adapters.get(&linear.weight)?;
            let is_changed = [linear.weight, adapter.down.weight, adapter.up.weight].contains(&param);
            Some((linear, adapter, adapter.magnitude.filter(|_| is_changed)?))
        });
        let Some((linear, adapter, magnitude)) = adapted.last() else {
            self.values[param.0][element] = value;
            return;
        };
        let before = row_norms(&self.values, linear, adapter);
        self.values[param.0][element] = value;
        let after = row_norms(&self.values, linear, adapter);
        let factors = after.into_iter().zip(before).map(|(after, before)| after / before);
        self.values[magnitude.0].iter_mut().zip(factors).for_each(|(length, factor)| *length *= factor);
    }
}

/// The lengths of the rows of an adapted weight.
fn row_norms(values: &[Vec<f64>], linear: &Linear, adapter: &Adapter) -> Vec<f64> {
    let Adapter { down, up, scale, .. } = adapter;
    let rank = down.outputs;
    let weight = |row: usize, column: usize| {
        let at = match linear.orientation {
            Orientation::OutIn => row * linear.inputs + column,
            Orientation::InOut => column * linear.outputs + row,
        };
        let low = |k: usize| {
            values[up.weight.0][row * rank + k] * values[down.weight.0][k * linear.inputs + column]
        };
        values[linear.weight.0][at] + scale * (0..rank).map(low).sum::<f64>()
    };
    let square = |row| (0..linear.inputs).map(|column| weight(row, column).powi(2)).sum::<f64>();
    (0..linear.outputs).map(|row| square(row).sqrt()).collect()
}

/// A model with features that other families add to a Llama: norms of heads (Qwen 3), GELU as a gate, capped scores
/// and logits (Gemma 2), windows (Mistral), scales of scores, and partially rotated heads (Phi).
#[derive(Clone)]
struct Capped {
    description: Description,
    embedding: Embedding,
    qkv: [Linear; 3],
    norms: [RmsNorm; 2],
    heads: Attention,
    rope: Rope,
    mix: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    head: Head,
}

impl Capped {
    fn new() -> Self {
        let mut d = Describe::new("Capped", 0.4);
        let embedding = d.embedding("embed", 13, 6);
        let heads = Attention {
            dropout: 0.2,
            scale: Some(0.7),
            softcap: Some(0.8),
            window: Some(3),
            ..Attention::new(4, 2, 4)
        };
        let qkv = [("q", 16), ("k", 8), ("v", 8)].map(|(name, outputs)| d.linear(name, 6, outputs, true));
        let norms = ["q_norm", "k_norm"].map(|name| d.rms_norm(name, "Norm", 4, 1e-5));
        let mix = d.linear("mix", 16, 6, false);
        let [gate, up] = ["gate", "up"].map(|name| d.linear(name, 6, 5, false));
        let down = d.linear("down", 5, 6, false);
        let head = Head { softcap: Some(1.5), ..d.head("head", 6, 13, None) };
        let rope = Rope { factor: 1.2, ..Rope::new(100.0, 2) };
        d.block("embedding", None, &[&embedding]);
        let [q, k, v] = &qkv;
        d.block("attention", Some(0), &[q, k, v, &norms[0], &norms[1], &mix]);
        d.block("mlp", Some(0), &[&gate, &up, &down]);
        d.block("head", None, &[&head]);
        let description = d.finish().unwrap();
        Self { description, embedding, qkv, norms, heads, rope, mix, gate, up, down, head }
    }
}

impl Architecture for Capped {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.head
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        b.embedding(&self.embedding)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        if block == BlockId(1) {
            let [q, k] = [0, 1].map(|part| {
                let heads = b.linear(x, &self.qkv[part])?;
                b.rms_norm_heads(heads, &self.norms[part])
            });
            let v = b.linear(x, &self.qkv[2])?;
            let qkv = b.concat(&[q?, k?, v]);
            let qkv = b.rope(qkv, &self.heads, &self.rope)?;
            let mixed = b.attention(qkv, None, &self.heads)?;
            let y = b.linear(mixed, &self.mix)?;
            return b.add(x, y);
        }
        let [gate, up] = b.linear_pair(x, &self.gate, &self.up)?;
        let inner = b.gated(Function::GeluTanh, gate, up)?;
        let inner = b.activation(Function::Gelu, inner);
        let y = b.linear(inner, &self.down)?;
        b.add(x, y)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        Ok(b.activation(Function::Gelu, x))
    }
}

/// A model whose block uses values several times: in place or not, kept or recomputed.
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

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, Error> {
        b.embedding(&self.embedding)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        if block == BlockId(1) {
            return Ok(x);
        }
        // Dropout must not change a value that is used again, nor one that a norm recomputes.
        let h = b.rms_norm(x, &self.norm)?;
        let dropped = b.dropout(h, 0.3);
        let g = b.activation(Function::GeluTanh, h);
        let [gate, up] = b.linear_pair(g, &self.wide, &self.wide)?;
        let gated = b.gated(Function::Silu, gate, up)?;
        let y = b.linear(gated, &self.back)?;
        let z = b.linear(gate, &self.back)?;
        let _unused = b.layer_norm(z, &self.other)?;
        let doubled = b.add(x, x)?;
        let doubled = b.dropout(doubled, 0.2);
        let sum = b.add(y, dropped)?;
        let sum = b.add(sum, sum)?;
        let sum = b.add(sum, z)?;
        let sum = b.layer_norm(sum, &self.other)?;
        let sum = b.activation(Function::GeluTanh, sum);
        let sum = b.add(h, sum)?;
        let sum = b.add(sum, g)?;
        b.add(sum, doubled)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, Error> {
        let h = b.rms_norm(x, &self.norm)?;
        b.add(h, x)
    }
}
