//! One training step without a run, for memories that record operations instead of executing them.

use std::sync::Arc;

use fsdp_comm::launch::Seat;
use fsdp_config::{Packing, Resolved};
use fsdp_core::comm::Comms;
use fsdp_core::engine::{Engine, ProgramOrder, StepInput};
use fsdp_core::plan::Plan;
use fsdp_core::{Digest, Rank};
use fsdp_nn::Backend;
use fsdp_nn::model::{Architecture, Batch, ModelProgram};

use crate::error::TrainError;
use crate::fit::expect_compiled;
use crate::job::{cuts, program_options};
use crate::loss_scale::LossScaler;
use crate::rule;

/// Issues the first step of a run on the first rank, on placeholder tokens; the other ranks connect and return.
/// Parameters are allocated but not initialized, and the report of the step is not read.
///
/// # Errors
/// Errors of the parts: operations that the memory does not support, ranks that lose their connection.
pub fn trace_step<M: Backend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Arc<Plan>,
    seat: Seat<M>,
) -> Result<(), TrainError> {
    expect_compiled(config, architecture)?;
    let Seat { rank, memory, gathers, reductions } = seat;
    let digest = Digest::of(&**plan);
    let comms = Comms::connect(&*memory, gathers, reductions, plan.mesh, &plan.groups(), digest)?;
    if rank != Rank(0) {
        return Ok(());
    }
    let options = program_options(config, architecture, plan, cuts(config, plan, rank));
    let program = ModelProgram::new(architecture.clone(), plan.spec.clone(), options);
    let rule = rule::rule(&config.train, &plan.spec)?;
    let mut engine = Engine::new(Arc::clone(&memory), Arc::clone(plan), comms, program, Box::new(rule))?;
    engine.program_mut().set_batches(&memory, 0, vec![placeholder_batch(config); plan.step.rounds])?;
    let loss_scale = LossScaler::of(config).map(|scaler| scaler.current().scale);
    engine.program_mut().set_loss_scale(loss_scale.unwrap_or(1.0));
    let (lr, grad_clip) = (config.train.optimizer.lr().unwrap_or(0.0), config.train.grad_clip);
    let input = StepInput { step: 1, lr, grad_clip, loss_scale, stop: false };
    Ok(engine.step(input, &mut ProgramOrder, &mut ())?)
}

/// A micro-batch of full samples: every target counts, and each packed sample is a single document.
fn placeholder_batch(config: &Resolved) -> Batch {
    let (samples, seq) = (config.train.micro_batch_size, config.data.seq_len);
    let positions = || (0..samples * seq).map(|row| (row % seq) as u32).collect();
    Batch {
        ids: vec![0; samples * seq],
        targets: vec![0; samples * seq],
        samples: (0..samples as u64).collect(),
        seq,
        positions: (config.data.packing == Packing::Packed).then(positions),
    }
}
