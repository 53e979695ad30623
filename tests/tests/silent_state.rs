//! Errors that no loss shows, in what steps leave behind: the norm of gradients, moments of the optimizer, and what backward
//! reads of forward. Each is planted on all ranks of a world; `verify` must find it, though the losses are what they would be
//! without it, to a hundredth.

use std::sync::{Arc, Mutex};

use fsdp_core::memory::{Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{Error, Queue};
use fsdp_nn::backend::{Operands, Outcome, Write};
use fsdp_nn::op::{Attention, Op};
use fsdp_nn::update::Part;
use fsdp_nn::{Backend, HostBuffer, HostMemory, HostOptions};
use fsdp_sim::Threads;
use fsdp_train::verify::{VerifyOptions, VerifyReport, WorldReport, verify};

use crate::expert_axis;
use crate::hooked::Hooked;
use crate::support::{LLAMA, config, job, options};

/// Verifies three steps on four ranks, which compute with what `plant` makes of their memory; returns the report of the world.
/// Fails if the fault is not found, or the losses show it.
fn found(model: &str, settings: &[&str], plant: fn(HostMemory) -> Hooked<HostMemory>) -> WorldReport {
    let dir = tempfile::tempdir().unwrap();
    let settings = [&["data.seq_len=8", "fsdp.param_dtype=\"f32\""], settings].concat();
    let ranks = Threads::new(options(), move |_, world| {
        let memory = HostMemory::new(HostOptions::default())?;
        Ok(Arc::new(match world {
            // The oracle.
            1 => Hooked::new(memory, Arc::new(HostMemory::execute)),
            _ => plant(memory),
        }))
    });
    let job = job(model, config(dir.path(), 61, &settings));
    let report = verify(&job, &ranks, &VerifyOptions::new(&[4], 3)).unwrap();
    let VerifyReport { mut worlds, oracle_losses, .. } = report;
    let world = worlds.remove(0);
    assert!(!world.failures.is_empty(), "not found");
    assert_eq!(world.losses[0], oracle_losses[0], "forward is right");
    for (got, want) in world.losses.iter().zip(&oracle_losses) {
        assert!((got - want).abs() < 0.01 * want, "the loss shows it: {got}, not {want}");
    }
    world
}

/// A sum of squares that counts every shard as often as there are replicas of it.
fn counted_twice(
    memory: &HostMemory,
    queue: Queue,
    operation: Arithmetic<'_, Slice<'_, HostBuffer>>,
    mut to: SliceMut<'_, HostBuffer>,
) -> Result<(), Error> {
    if let Arithmetic::SquareSum(gradients, rows) = operation {
        memory.compute(queue, Arithmetic::SquareSum(gradients, rows), to.reborrow())?;
    }
    memory.compute(queue, operation, to)
}

#[test]
fn norm_that_counts_replicas_is_found() {
    let plant =
        |memory| Hooked { compute: counted_twice, ..Hooked::new(memory, Arc::new(HostMemory::execute)) };
    let world = found(LLAMA, &["fsdp.mesh={ replicate = 2 }"], plant);
    assert!(world.norm_difference > 0.0, "{:?}", world.failures);
    assert_eq!(world.gradients.differing, 0, "gradients are right before they are clipped");
}

fn values(memory: &HostMemory, slice: Slice<'_, HostBuffer>) -> Result<Vec<f64>, Error> {
    let mut values = vec![0.0; slice.len];
    memory.read(Queue::Compute, slice, HostSliceMut::F64(&mut values))?;
    Ok(values)
}

/// An update that leaves out parameters without any gradient, and their moments: experts that no token has chosen.
fn without_idle(
    memory: &HostMemory,
    part: &Part,
    stage: &mut Stage<'_, HostBuffer>,
    shard: &mut SegmentShard<'_, HostBuffer>,
    scalars: &StepScalars<'_, HostBuffer>,
) -> Result<Outcome, Error> {
    let mut idle = Vec::new();
    for piece in shard.pieces {
        let at = |buffer| values(memory, Slice::new(buffer, piece.offset, piece.len));
        if at(shard.gradient)?.iter().all(|gradient| *gradient == 0.0) {
            let states = shard.state.iter().map(&at).collect::<Result<Vec<_>, _>>()?;
            idle.push((piece, at(shard.params)?, states));
        }
    }
    let outcome = memory.update(part, stage, shard, scalars)?;
    for (piece, params, states) in idle {
        let buffers = std::iter::once(&mut *shard.params).chain(shard.state.iter_mut());
        for (buffer, old) in buffers.zip(std::iter::once(params).chain(states)) {
            let to = SliceMut::new(buffer, piece.offset, piece.len);
            memory.write(Queue::Compute, HostSlice::F64(&old), to)?;
        }
    }
    Ok(outcome)
}

#[test]
fn update_that_leaves_out_idle_experts_is_found() {
    // Fewer routes than experts, so that some have no token in any step.
    let model = expert_axis::model("mixtral");
    let more = [
        ("\"num_local_experts\": 4", "\"num_local_experts\": 32"),
        ("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 1"),
    ];
    let model = more.iter().fold(model, |model, (few, many)| {
        assert!(model.contains(few));
        model.replace(few, many)
    });
    let plant =
        |memory| Hooked { update: without_idle, ..Hooked::new(memory, Arc::new(HostMemory::execute)) };
    for mesh in ["fsdp.mesh={ shard = 4 }", "fsdp.mesh={ expert = 2 }"] {
        let settings =
            [mesh, "train.micro_batch_size=1", "train.global_batch_size=4", "fsdp.min_num_params=500"];
        let world = found(&model, &settings, plant);
        assert!(world.params.differing > 0, "decay: {:?}", world.failures);
        assert!(world.states.differing > 0, "moments: {:?}", world.failures);
        assert_eq!(world.gradients.differing, 0, "{mesh}");
    }
}

/// Backward of attention with the keys and values of the first such call on this rank, as if they were kept for all.
fn with_first_keys(memory: HostMemory) -> Hooked<HostMemory> {
    let first: Mutex<Option<Vec<f64>>> = Mutex::default();
    let spare = HostMemory::new(HostOptions::default()).unwrap();
    let hook = move |memory: &HostMemory, op: &Op, operands: Operands<'_, '_, HostBuffer>| {
        let Op::Attention(Attention::Backward { dims, .. }) = op else { return memory.execute(op, operands) };
        let Operands { reads, writes, batch } = operands;
        let mut packed = values(memory, reads[0])?;
        let mut first = first.lock().unwrap();
        let kept = first.get_or_insert_with(|| packed.clone());
        let queries = dims.heads * dims.head_dim;
        for (row, kept) in packed.chunks_mut(dims.packed()).zip(kept.chunks(dims.packed())) {
            row[queries..].copy_from_slice(&kept[queries..]);
        }
        // In another memory, so that nothing is counted.
        let mut buffer = spare.allocate(Category::Activation, reads[0].buffer.dtype(), packed.len())?;
        spare.write(Queue::Compute, HostSlice::F64(&packed), SliceMut::whole(&mut buffer))?;
        let reads = [&[Slice::whole(&buffer)], &reads[1..]].concat();
        let mut writes: Vec<_> = writes
            .iter_mut()
            .map(|write| Write { slice: write.slice.reborrow(), accumulate: write.accumulate })
            .collect();
        memory.execute(op, Operands { reads: &reads, writes: &mut writes, batch })
    };
    Hooked::new(memory, Arc::new(hook))
}

#[test]
fn backward_with_keys_and_values_of_another_call_is_found() {
    for mesh in ["fsdp.mesh={ shard = 4 }", "fsdp.mesh={ context = 2 }"] {
        let world = found(LLAMA, &[mesh], with_first_keys);
        assert!(world.gradients.differing > 0, "{mesh}: {:?}", world.failures);
    }
}
