//! Sharded training against the oracle, both on libtorch.
//!
//! What is promised are bounds; on one thread of libtorch, operations on aligned operands repeat their bits, so whole runs
//! do, and the tests say so: where they stop doing it, docs/numerics.md has to be changed.

use fsdp_core::memory::{HostSlice, SliceMut};
use fsdp_core::model::BlockId;
use fsdp_core::{Error, Queue};
use fsdp_cuda::torch::Kernels;
use fsdp_nn::Backend;
use fsdp_nn::layer::{Description, Head};
use fsdp_nn::model::{Architecture, Mlp, MlpConfig};
use fsdp_nn::tape::{Backward, Node, Tape, Tensor, Value};
use fsdp_train::Job;
use fsdp_train::verify::{VerifyOptions, WorldReport, verify};

use crate::ranks::threads;
use crate::support::{GPT2, LLAMA, config, job, job_of};

fn check<A: Architecture + Clone>(job: &Job<A>, kernels: Kernels, worlds: &[usize]) -> Vec<WorldReport> {
    let report = verify(job, &threads(kernels), &VerifyOptions::new(worlds, 3));
    let report = report.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.worlds.len(), worlds.len(), "{:?}", report.skipped);
    for world in &report.worlds {
        assert!(world.failures.is_empty(), "{kernels:?}, world {}: {:#?}", world.world, world.failures);
        assert_eq!(world.promise, "derived bounds");
    }
    report.worlds
}

fn differing(world: &WorldReport) -> u64 {
    world.params.differing + world.gradients.differing + world.states.differing
}

#[test]
fn sharded_runs_are_the_unsharded_ones() {
    for (model, vocab, wrap) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        for (param, reduce) in [("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f64", "f64")] {
            let dir = tempfile::tempdir().expect("a temporary folder");
            let overrides = [
                &format!("fsdp.wrap=[\"{wrap}\"]"),
                &format!("fsdp.param_dtype=\"{param}\""),
                &format!("fsdp.reduce_dtype=\"{reduce}\""),
            ];
            let job = job(model, config(dir.path(), vocab, &overrides.map(String::as_str)));
            for kernels in [Kernels::Fused, Kernels::Aten] {
                for world in check(&job, kernels, &[1, 2, 4]) {
                    // Additions in bf16 are rounded in the order of the ranks.
                    let same = differing(&world) == 0 && world.norm_difference == 0.0;
                    assert!(
                        same || reduce == "bf16",
                        "{wrap} in {param} with {kernels:?}, world {}: {:?}",
                        world.world,
                        world.gradients
                    );
                }
            }
        }
    }
}

#[test]
fn recomputed_offloaded_and_replicated_runs_stay_within_the_bounds() {
    for (more, worlds) in [
        ("fsdp.activation_checkpointing=\"full\"", &[2, 3][..]),
        ("fsdp.activation_checkpointing=\"selective\"", &[2, 3]),
        ("fsdp.offload=\"cpu\"", &[2, 3]),
        ("fsdp.mesh={ replicate = 2 }", &[2, 4]),
        ("fsdp.accumulation=\"unsharded\"", &[2]),
    ] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let overrides = [
            "fsdp.wrap=[\"LlamaDecoderLayer\"]",
            "fsdp.param_dtype=\"bf16\"",
            "train.global_batch_size=24",
            more,
        ];
        let job = job(LLAMA, config(dir.path(), 61, &overrides));
        check(&job, Kernels::Fused, worlds);
    }
}

/// An MLP whose embedding receives small integers as gradients: they sum exactly in every order.
#[derive(Clone)]
struct Integers(Mlp);

impl Architecture for Integers {
    fn description(&self) -> &Description {
        self.0.description()
    }

    fn head(&self) -> Head {
        self.0.head()
    }

    fn first<M: Backend>(&self, tape: &mut Tape<'_, M>) -> Result<Tensor<M>, Error> {
        let x = self.0.first(tape)?;
        let (input, width) = (x.value(), x.width());
        let output = tape.value(input.needs_gradient);
        if output.needs_gradient {
            tape.record(IntegerGradient { input, output, width });
        }
        Ok(Tensor::new(x.into_buffer(), output, width))
    }

    fn middle<M: Backend>(
        &self,
        block: BlockId,
        tape: &mut Tape<'_, M>,
        x: Tensor<M>,
    ) -> Result<Tensor<M>, Error> {
        self.0.middle(block, tape, x)
    }

    fn last<M: Backend>(&self, tape: &mut Tape<'_, M>, x: Tensor<M>) -> Result<Tensor<M>, Error> {
        self.0.last(tape, x)
    }
}

/// Replaces the gradient by integers from -3 to 3 that depend on sample, position and column.
struct IntegerGradient {
    input: Value,
    output: Value,
    width: usize,
}

impl<M: Backend> Node<M> for IntegerGradient {
    fn backward(self: Box<Self>, walk: &mut Backward<'_, M>) -> Result<(), Error> {
        let Some(mut gradient) = walk.take_for(self.output, self.input)? else { return Ok(()) };
        let (samples, seq) = (walk.scope.batch.samples, walk.scope.batch.seq);
        let values: Vec<f32> = samples
            .iter()
            .flat_map(|&sample| (0..seq * self.width).map(move |i| (sample * 5 + i as u64 * 3) % 7))
            .map(|value| value as f32 - 3.0)
            .collect();
        let memory = walk.scope.memory;
        memory.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut gradient.buffer))?;
        walk.put(self.input, gradient)
    }
}

#[test]
fn exactly_summable_gradients_have_the_same_bits_at_every_world() {
    let sizes = MlpConfig { vocab: 5, widths: vec![3], bias: false, tied: false, std: 0.5 };
    for (accumulation, order, reduce) in
        [("reduce", "tree", "f32"), ("reduce", "running", "bf16"), ("unsharded", "tree", "bf16")]
    {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let overrides = [
            "train.micro_batch_size=1",
            "train.global_batch_size=24",
            "run.ranks=1",
            "data.seq_len=2",
            "fsdp.frozen=[\"head\"]",
            &format!("fsdp.accumulation=\"{accumulation}\""),
            &format!("fsdp.accumulation_order=\"{order}\""),
            &format!("fsdp.reduce_dtype=\"{reduce}\""),
        ];
        let model = Mlp::new(&sizes).unwrap_or_else(|error| panic!("{error}"));
        let job = job_of(Integers(model), config(dir.path(), 5, &overrides));
        for world in check(&job, Kernels::Fused, &[1, 2, 3, 4]) {
            assert!(world.gradients.compared > 0);
            assert_eq!((differing(&world), world.norm_difference), (0, 0.0), "world {}", world.world);
        }
    }
}
