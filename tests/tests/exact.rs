//! Cases in which all world sizes, powers of two or not, must agree in every bit: gradients that sum exactly, shared
//! storage, and evaluation.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_core::memory::{Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue, Rank};
use fsdp_nn::backend::{BatchFacts, Operands, Write};
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::op::{Lookup, Op};
use fsdp_nn::{Backend, HostBuffer, HostMemory, HostOptions};
use fsdp_sim::SeededOrder;
use fsdp_sim::Threads;
use fsdp_train::RankTrainer;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::hooked::{self, Hooked, integers};
use crate::runs::train;
use crate::support::{GPT2, LLAMA, config, job, job_of, options, threads, threads_with, tokens};

/// Ranks whose embeddings receive small integers as gradients, which sum exactly in every order.
fn integer_ranks() -> Threads<Hooked<HostMemory>> {
    Threads::new(options(), |_, _| {
        let memory =
            || HostMemory::new(HostOptions { poison: true, resident: true, ..HostOptions::default() });
        // A separate memory, so that the counters of the rank's own memory match the prediction.
        let aside = memory()?;
        let hook = move |memory: &HostMemory, op: &Op, operands: Operands<'_, '_, HostBuffer>| {
            let Op::Lookup(Lookup::EmbeddingBackward { rows, width, .. }) = *op else {
                return memory.execute(op, operands);
            };
            let ids: Vec<u32> = hooked::ids(memory.bytes(operands.reads[0])?);
            let mut gradient = aside.allocate(Category::Workspace, DType::F32, rows * width)?;
            let values = integers(&ids, width);
            aside.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut gradient))?;
            let reads = &[operands.reads[0], Slice::whole(&gradient)];
            let mut writes: Vec<_> = operands.writes.iter_mut().map(Write::reborrow).collect();
            memory.execute(op, Operands { reads, writes: &mut writes, batch: BatchFacts::default() })
        };
        Ok(Arc::new(Hooked::new(memory()?, Arc::new(hook))))
    })
}

#[test]
fn exact_gradients_are_bitwise_equal_at_every_world_and_mode() {
    let sizes = MlpConfig { vocab: 5, widths: vec![3], bias: false, tied: false, std: 0.5 };
    for (micro_batches, worlds) in [(24, &[1, 2, 3, 4, 6, 8][..]), (35, &[5, 7])] {
        for (accumulation, order, reduce) in [
            ("reduce", "tree", "f32"),
            ("reduce", "running", "bf16"),
            ("unsharded", "tree", "bf16"),
            ("unsharded", "running", "f32"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let overrides = [
                "train.micro_batch_size=1",
                &format!("train.global_batch_size={micro_batches}"),
                "run.ranks=1",
                "data.seq_len=2",
                "fsdp.frozen=[\"head\"]",
                &format!("fsdp.accumulation=\"{accumulation}\""),
                &format!("fsdp.accumulation_order=\"{order}\""),
                &format!("fsdp.reduce_dtype=\"{reduce}\""),
            ];
            let job = job_of(Mlp::new(&sizes).unwrap(), config(dir.path(), 5, &overrides));
            let report = verify(&job, &integer_ranks(), &VerifyOptions::new(worlds, 3)).unwrap();
            assert_eq!(report.worlds.len(), worlds.len());
            for world in &report.worlds {
                assert!(world.failures.is_empty(), "world {}: {:#?}", world.world, world.failures);
                let differing = world.params.differing + world.gradients.differing + world.states.differing;
                assert!(world.gradients.compared > 0);
                assert_eq!(
                    (differing, world.norm_difference, world.loss_difference),
                    (0, 0.0, 0.0),
                    "world {} with {accumulation}, {order}, {reduce}",
                    world.world
                );
            }
        }
    }
}

#[test]
fn shared_unsharded_buffers_match_separate_ones_bitwise() {
    for (model, vocab, wrap) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        for (ranks, replicas) in [(3, 1), (4, 2), (4, 1)] {
            let dir = tempfile::tempdir().unwrap();
            let overrides = [
                "train.global_batch_size=24",
                &format!("run.ranks={ranks}"),
                &format!("fsdp.mesh={{ replicate = {replicas} }}"),
                &format!("fsdp.wrap=[\"{wrap}\"]"),
            ];
            let jobs = [job(model, config(dir.path(), vocab, &overrides))];
            let run = |shared: bool| {
                let mut options = options();
                options.share_unsharded = shared;
                let order = |rank: Rank| -> Box<dyn fsdp_core::engine::IssueOrder> {
                    Box::new(SeededOrder::for_rank(7, rank.0))
                };
                train(&jobs, &threads_with(options), 3, order).unwrap()
            };
            for (apart, together) in run(false).iter().zip(run(true)) {
                assert_eq!(apart.reports, together.reports);
                assert_eq!(apart.shards, together.shards);
                assert_eq!(
                    apart.usage.last().unwrap().device.peak_bytes,
                    together.usage.last().unwrap().device.peak_bytes
                );
            }
        }
    }
}

/// Returns loss (as bits) and targets of an evaluation before training, on two sets, at a world size.
fn evaluation(model: &str, vocab: u32, world: usize, more: &[&str]) -> [(u64, u64); 2] {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("eval");
    std::fs::create_dir(&data).unwrap();
    // 19 samples of 7 tokens: one full batch of 12 micro-batches of one sample, and 7 of the next.
    let eval = tokens(&data, vocab, 19 * 7 + 1);
    let sets = format!(
        "data.eval=[{{name='all', paths=['{eval}']}}, {{name='some', paths=['{eval}'], max_samples=15}}]"
    );
    let (eval, ranks) = (sets, format!("run.ranks={world}"));
    let mut overrides = vec!["train.micro_batch_size=1", "train.global_batch_size=12", &eval, &ranks];
    overrides.extend(more);
    let job = job(model, config(dir.path(), vocab, &overrides));
    let ranks = threads()
        .launch(world, &|seat: Seat<HostMemory>| {
            let mut trainer = RankTrainer::new(&job, seat)?;
            let first = trainer.evaluate(0, &AtomicBool::new(false), &mut ProgramOrder, &mut ())?;
            let again = trainer.evaluate(0, &AtomicBool::new(false), &mut ProgramOrder, &mut ())?;
            assert_eq!(first, again, "evaluation changes nothing");
            Ok::<_, fsdp_train::TrainError>(first.expect("nobody asks to stop"))
        })
        .unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "all ranks agree");
    let found: Vec<(u64, u64)> = ranks[0].iter().map(|set| (set.loss.to_bits(), set.targets)).collect();
    found.try_into().expect("two sets are evaluated")
}

#[test]
fn padded_evaluation_is_bitwise_equal_at_every_world_size() {
    for (model, vocab, wrap) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        let wrap = format!("fsdp.wrap=[\"{wrap}\"]");
        let alone = evaluation(model, vocab, 1, &[&wrap]);
        assert_eq!(alone.map(|(_, targets)| targets), [19 * 7, 15 * 7], "padding does not count");
        assert_ne!(alone[0].0, alone[1].0);
        for world in [2, 3, 4, 6, 12] {
            assert_eq!(evaluation(model, vocab, world, &[&wrap]), alone, "world {world}");
        }
        let kept = ["fsdp.reshard_after_forward=false", "fsdp.mesh={ replicate = 2 }"];
        assert_eq!(evaluation(model, vocab, 4, &kept), alone);
    }
}
