//! Sharded training against the oracle, both on libtorch.
//!
//! Only bounds are promised. But on one thread, libtorch's operations on aligned operands repeat their bits, so whole
//! runs do too, and the tests require it: if that stops, docs/numerics.md must be changed.

use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_core::memory::{Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_cuda::torch::{Kernels, set_intra_op};
use fsdp_nn::backend::{BatchFacts, Operands, Write};
use fsdp_nn::model::{Architecture, Mlp, MlpConfig};
use fsdp_nn::op::{Lookup, Op};
use fsdp_nn::{Backend, HostBuffer};
use fsdp_sim::{ThreadOptions, Threads};
use fsdp_train::Job;
use fsdp_train::verify::{VerifyOptions, WorldReport, verify};

use crate::hooked::{self, Hooked};
use crate::ranks::{RankMemory, memory, threads};
use crate::support::{GPT2, LLAMA, config, job, job_of};

fn check<A: Architecture + Clone>(job: &Job<A>, kernels: Kernels, worlds: &[usize]) -> Vec<WorldReport> {
    check_on(&threads(kernels), job, worlds)
}

fn check_on<L, A>(launcher: &L, job: &Job<A>, worlds: &[usize]) -> Vec<WorldReport>
where
    L: Launcher,
    L::Memory: Backend,
    A: Architecture + Clone,
{
    let report = verify(job, launcher, &VerifyOptions::new(worlds, 3));
    let report = report.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.worlds.len(), worlds.len(), "{:?}", report.skipped);
    for world in &report.worlds {
        assert!(world.failures.is_empty(), "world {}: {:#?}", world.world, world.failures);
        assert_eq!(world.promise, "derived bounds");
    }
    report.worlds
}

pub(crate) fn differing(world: &WorldReport) -> u64 {
    world.params.differing + world.gradients.differing + world.states.differing
}

#[test]
fn sharded_runs_match_unsharded_runs() {
    for (model, vocab, wrap) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        let types = [("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32"), ("f64", "f64")];
        for (param, reduce) in types {
            let dir = tempfile::tempdir().expect("a temporary folder");
            let mut overrides = vec![
                format!("fsdp.wrap=[\"{wrap}\"]"),
                format!("fsdp.param_dtype=\"{param}\""),
                format!("fsdp.reduce_dtype=\"{reduce}\""),
            ];
            overrides.extend((param == "f16").then(|| "train.loss_scale.init=256".to_owned()));
            let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
            let job = job(model, config(dir.path(), vocab, &overrides));
            for kernels in [Kernels::Fused, Kernels::Aten] {
                for world in check(&job, kernels, &[1, 2, 4]) {
                    // Sums in bf16 round in the order of the ranks.
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
fn runs_with_averaged_gradients_stay_within_bounds() {
    for (reduce, replicas, worlds) in [("f32", 1, &[1, 2, 3, 4][..]), ("bf16", 1, &[2, 3]), ("bf16", 2, &[4])]
    {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let overrides = [
            "fsdp.wrap=[\"LlamaDecoderLayer\"]",
            "fsdp.reduce_op=\"average\"",
            "train.global_batch_size=24",
            &format!("fsdp.reduce_dtype=\"{reduce}\""),
            &format!("fsdp.mesh={{ replicate = {replicas} }}"),
        ];
        let job = job(LLAMA, config(dir.path(), 61, &overrides));
        check(&job, Kernels::Fused, worlds);
    }
}

#[test]
fn recomputed_offloaded_replicated_runs_stay_within_bounds() {
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

/// Launches ranks whose embeddings receive small integers as gradients, which sum exactly in every order.
fn integer_ranks() -> Threads<Hooked<RankMemory>> {
    set_intra_op(1);
    Threads::new(ThreadOptions::default(), |_, _| {
        let aside = memory(Kernels::Fused)?;
        let hook = move |memory: &RankMemory, op: &Op, operands: Operands<'_, '_, HostBuffer>| {
            let Op::Lookup(Lookup::EmbeddingBackward { rows, width, .. }) = *op else {
                return memory.execute(op, operands);
            };
            let ids = hooked::ids(memory.storage().bytes(operands.reads[0])?);
            let mut gradient = aside.allocate(Category::Workspace, DType::F32, rows * width)?;
            let values = hooked::integers(&ids, width);
            aside.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut gradient))?;
            let reads = &[operands.reads[0], Slice::whole(&gradient)];
            let mut writes: Vec<_> = operands.writes.iter_mut().map(Write::reborrow).collect();
            memory.execute(op, Operands { reads, writes: &mut writes, batch: BatchFacts::default() })
        };
        Ok(Arc::new(Hooked::new(memory(Kernels::Fused)?, Arc::new(hook))))
    })
}

#[test]
fn exactly_summable_gradients_match_bitwise_at_every_world_size() {
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
        let job = job_of(model, config(dir.path(), 5, &overrides));
        for world in check_on(&integer_ranks(), &job, &[1, 2, 3, 4]) {
            assert!(world.gradients.compared > 0);
            assert_eq!((differing(&world), world.norm_difference), (0, 0.0), "world {}", world.world);
        }
    }
}
