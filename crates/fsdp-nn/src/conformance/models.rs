//! Runs an unsharded model on one memory, micro-batch by micro-batch.

use std::sync::Arc;

use fsdp_core::DType;
use fsdp_core::ExactSum;
use fsdp_core::Queue;
use fsdp_core::comm::Comms;
use fsdp_core::memory::{Buffer, SliceMut};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice};
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::program::{Gradients, Pass, Program, calls};
use fsdp_core::scalars::LOSS;
use fsdp_core::schedule::Round;

use super::decoders::llama;
use crate::backend::{AttentionDims, Backend};
use crate::cuts::Cuts;
use crate::hf::HfModel;
use crate::layer::Lora;
use crate::model::unsharded::{Whole, run};
use crate::model::{
    Adapted, Architecture, Batch, Decoder, Gpt2, Gpt2Config, Mlp, MlpConfig, ModelProgram, ProgramOptions,
};
use crate::op::LossTerms;

/// A model with parameter values.
pub(crate) struct Sample<A> {
    pub(crate) architecture: A,
    pub(crate) spec: ModelSpec,
    pub(crate) values: Vec<Vec<f64>>,
    pub(crate) dtype: DType,
    pub(crate) step: u64,
    pub(crate) loss_scale: f64,
}

/// The results of a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) loss: f64,
    pub(crate) count: u64,
    pub(crate) gradients: Vec<Vec<f64>>,
}

impl<A: Architecture + Clone> Sample<A> {
    /// Creates a model with its initial values plus noise, so that no element of a norm or bias is exactly 0 or 1.
    pub(crate) fn new(architecture: A, dtype: DType) -> Self {
        let description = architecture.description();
        let spec = description.spec.clone();
        let values = |(index, param): (usize, &fsdp_core::model::ParamSpec)| {
            let init = description.init(ParamId(index)).values(1, &param.fqn, 0);
            let noise = crate::init::Init::Normal { std: 0.1 }.values(2, &param.fqn, 0);
            init.zip(noise).map(|(init, noise)| init + noise).take(param.len()).collect()
        };
        let values = spec.params.iter().enumerate().map(values).collect();
        Self { architecture, spec, values, dtype, step: 3, loss_scale: 1.0 }
    }

    pub(crate) fn program<M: Backend>(&self) -> ModelProgram<M, A> {
        let router_loss = self.architecture.description().router_loss;
        let terms = LossTerms { router_loss, loss_scale: self.loss_scale, ..LossTerms::default() };
        let options = ProgramOptions { dtype: self.dtype, seed: 11, terms, cuts: Cuts::WHOLE };
        ModelProgram::new(self.architecture.clone(), self.spec.clone(), options)
    }

    pub(crate) fn whole<M: Backend>(&self, memory: &M) -> Whole<M::Buffer> {
        let mut whole = Whole::new(memory, &self.spec, Category::Unsharded, self.dtype).unwrap();
        for (index, values) in self.values.iter().enumerate() {
            whole.write(memory, ParamId(index), HostSlice::F64(values)).unwrap();
        }
        whole
    }

    pub(crate) fn open_gradients<M: Backend>(&self, memory: &M) -> Gradients<M::Buffer> {
        let whole = Whole::new(memory, &self.spec, Category::GradientSlot, self.dtype.master());
        whole.unwrap().into_gradients(&self.spec)
    }

    /// Runs one micro-batch; gradients of frozen parameters are zero.
    pub(crate) fn run_on<M: Backend>(&self, memory: &M, batch: &Batch, pass: Pass) -> Outcome {
        let mut program = self.program();
        program.set_batches(memory, self.step, vec![batch.clone()]).unwrap();
        let mut params = self.whole(memory).params();
        let mut gradients = self.open_gradients(memory);
        run(&mut program, memory, 0, pass, &mut params, &mut gradients).unwrap();
        let len = self.spec.tallies.scalar_words();
        let mut words = memory.allocate(Category::CommStaging, DType::I64, len).unwrap();
        memory.zero(Queue::Compute, SliceMut::whole(&mut words)).unwrap();
        let count = program.take_loss(memory, Queue::Compute, SliceMut::whole(&mut words)).unwrap();
        let mut loss = [0; ExactSum::WORDS];
        let sum = Slice::new(&words, LOSS.start, LOSS.len());
        memory.read(Queue::Compute, sum, HostSliceMut::I64(&mut loss)).unwrap();
        let gradients = Whole::from_gradients(memory, &self.spec, gradients).unwrap();
        let gradient = |(index, param): (usize, &fsdp_core::model::ParamSpec)| {
            let mut values = vec![0.0; param.len()];
            if param.trainable && pass != Pass::Evaluate {
                gradients.read(memory, ParamId(index), HostSliceMut::F64(&mut values)).unwrap();
            }
            values
        };
        let gradients = self.spec.params.iter().enumerate().map(gradient).collect();
        Outcome { loss: ExactSum::from_words(&loss).value(), count, gradients }
    }

    /// Returns the logits of every token.
    pub(crate) fn logits<M: Backend>(&self, memory: &M, batch: &Batch) -> Vec<f64> {
        let mut program = self.program();
        program.set_batches(memory, self.step, vec![batch.clone()]).unwrap();
        let mut params = self.whole(memory).params();
        program.begin(memory, Round(0), Pass::Evaluate).unwrap();
        for call in calls(&self.spec, Pass::Evaluate) {
            params.enter(call.block());
            if !call.is_last() {
                program.call(memory, call, &params, &mut [], &mut Comms::alone()).unwrap();
            }
        }
        let logits = program.logits(memory, &params).unwrap();
        let mut values = vec![0.0; logits.len()];
        memory.read(Queue::Compute, Slice::whole(&logits), HostSliceMut::F64(&mut values)).unwrap();
        values
    }
}

/// Returns samples of tokens without an obvious pattern.
pub(crate) fn batch(samples: usize, seq: usize, vocab: usize) -> Batch {
    let token = |i: usize| ((i * i * 7 + i * 3 + 1) % vocab) as u32;
    Batch {
        ids: (0..samples * seq).map(token).collect(),
        targets: (0..samples * seq).map(|i| token(i + 5)).collect(),
        samples: (0..samples as u64).map(|sample| sample + 40).collect(),
        seq,
        positions: None,
    }
}

/// [`batch`] whose samples hold documents of up to 3 tokens.
pub(crate) fn packed_batch(samples: usize, seq: usize, vocab: usize) -> Batch {
    let positions = (0..samples).flat_map(|_| (0..seq).map(|position| position as u32 % 3)).collect();
    Batch { positions: Some(positions), ..batch(samples, seq, vocab) }
}

/// A GPT-2 with every option enabled.
pub(crate) fn gpt2() -> Gpt2Config {
    Gpt2Config {
        vocab_size: 13,
        n_positions: 9,
        n_embd: 12,
        n_layer: 2,
        n_head: 3,
        n_inner: 20,
        layer_norm_epsilon: 1e-5,
        embd_pdrop: 0.1,
        attn_pdrop: 0.2,
        resid_pdrop: 0.3,
        tie_word_embeddings: true,
        initializer_range: 0.3,
    }
}

/// A tied MLP with odd sizes.
pub(crate) fn mlp() -> MlpConfig {
    MlpConfig { vocab: 13, widths: vec![5, 7, 5], bias: true, tied: true, std: 0.5 }
}

/// One model of each kind.
pub(crate) fn hf_models() -> [HfModel; 2] {
    [Arc::new(Decoder::new(&llama()).unwrap()), Arc::new(Gpt2::new(&gpt2()).unwrap())]
}

/// Adds adapters to all linear maps of a model, and to those of experts if there is no dropout and no DoRA; also trains one of the
/// model's own parameters.
pub(crate) fn adapted<A: Architecture>(base: A, dropout: f64, dora: bool) -> Adapted<A> {
    let mut description = base.description().clone();
    let targets: Vec<usize> = (0..description.linears.len()).collect();
    let lora = Lora { rank: 2, scale: 1.5, dropout, dora };
    description.adapt(&targets, &[ParamId(1)].into(), lora);
    if dropout == 0.0 && !dora {
        let inputs: Vec<usize> = description.experts.iter().map(|maps| maps.dims.inputs).collect();
        let mut first = 0;
        for maps in inputs.chunk_by(|a, b| a == b) {
            description.adapt_experts(first..first + maps.len(), lora);
            first += maps.len();
        }
    }
    Adapted::new(base, description)
}

/// The MLP of [`mlp`].
pub(crate) fn small() -> Mlp {
    Mlp::new(&mlp()).unwrap()
}

/// Packs rows of queries, keys and values, or extracts them.
pub(crate) struct Packed {
    pub(crate) dims: AttentionDims,
}

impl Packed {
    fn widths(&self) -> [usize; 3] {
        [self.dims.heads, self.dims.kv_heads, self.dims.kv_heads].map(|heads| heads * self.dims.head_dim)
    }

    pub(crate) fn pack(&self, parts: [&[f64]; 3]) -> Vec<f64> {
        let row = |row: usize| {
            let part = move |(part, width): (&[f64], usize)| part[row * width..][..width].to_vec();
            parts.into_iter().zip(self.widths()).flat_map(part)
        };
        (0..self.dims.rows()).flat_map(row).collect()
    }

    pub(crate) fn part(&self, packed: &[f64], index: usize) -> Vec<f64> {
        let widths = self.widths();
        let start: usize = widths[..index].iter().sum();
        packed.chunks(self.dims.packed()).flat_map(|row| row[start..][..widths[index]].to_vec()).collect()
    }
}
