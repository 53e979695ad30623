//! Errors that no loss shows: of the kinds with which systems have shipped where sharding meets ranks that share samples
//! and mixtures of experts. Each is planted in the operations of all ranks; `verify` must find it, though the losses are what
//! they would be without it, to a hundredth.

use std::sync::Arc;

use fsdp_core::Queue;
use fsdp_core::memory::{Arithmetic, Memory, SliceMut};
use fsdp_nn::backend::Operands;
use fsdp_nn::op::{Attention, Experts, Head, Linear, Norm, Op, Pointwise, RouterTerms};
use fsdp_nn::{Backend, HostBuffer, HostMemory, HostOptions};
use fsdp_sim::Threads;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::expert_axis;
use crate::hooked::Hooked;
use crate::support::{GPT2, LLAMA, config, job, options};

/// What is done to an operation.
#[derive(Clone, Copy)]
enum Fault {
    /// A factor of the result number `.0`.
    Scaled(usize, f64),
    /// The last part of the result number `.0` is lost: one of so many.
    Cut(usize, usize),
    /// The coefficient of the balancing loss has this factor in backward.
    Balance(f64),
    /// What is to be added replaces what it should be added to.
    Overwritten,
}

/// A fault, and the operations that have it.
struct Planted {
    name: &'static str,
    model: &'static str,
    /// The axes that it is tried on, all of two ranks but where a model has fewer key heads than chunks.
    axes: &'static [&'static str],
    is_faulty: fn(&Op) -> bool,
    fault: Fault,
}

/// Faults of mixtures are tried where ranks share samples, and where they share experts.
const BOTH: &[&str] = &["context = 2", "expert = 2"];
const CONTEXT: &[&str] = &["context = 2"];

/// A golden model with a balancing loss.
const MIXTRAL: &str = "mixtral-balanced";

const ALL: [Planted; 15] = [
    Planted {
        name: "gradients of experts are too large by the size of an axis",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::ProductBackwardWeight { .. })),
        fault: Fault::Scaled(0, 2.0),
    },
    Planted {
        name: "gradients of experts that one rank has alone are doubled",
        model: MIXTRAL,
        axes: &["expert = 4"],
        is_faulty: |op| matches!(op, Op::Experts(Experts::ProductBackwardWeight { .. })),
        fault: Fault::Scaled(0, 2.0),
    },
    Planted {
        name: "one expert is left out of the update",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::ProductBackwardWeight { expert: 1, .. })),
        fault: Fault::Scaled(0, 0.0),
    },
    Planted {
        name: "gradients of experts over the rows of another rank are lost",
        model: MIXTRAL,
        axes: &["expert = 2"],
        is_faulty: |op| matches!(op, Op::Experts(Experts::ProductBackwardWeight { source: 1, .. })),
        fault: Fault::Scaled(0, 0.0),
    },
    Planted {
        name: "rows have the gradient of half of their experts",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::DispatchBackward { .. })),
        fault: Fault::Scaled(0, 0.5),
    },
    Planted {
        name: "of chunks that share a key head, only the last gives it a gradient",
        model: LLAMA,
        axes: &["context = 4"],
        is_faulty: |op| matches!(op, Op::Pointwise(Pointwise::CopyColumns { .. })),
        fault: Fault::Overwritten,
    },
    Planted {
        name: "routes have half of their gradient",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::CombineBackward { .. })),
        fault: Fault::Scaled(1, 0.5),
    },
    Planted {
        name: "the router is cut off from its gradient",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::RouteBackward { .. })),
        fault: Fault::Scaled(0, 0.0),
    },
    Planted {
        name: "the balancing loss is divided by the axis",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::RouteBackward { .. })),
        fault: Fault::Balance(0.5),
    },
    Planted {
        name: "the balancing loss counts once per rank that shares samples",
        model: MIXTRAL,
        axes: BOTH,
        is_faulty: |op| matches!(op, Op::Experts(Experts::RouteBackward { .. })),
        fault: Fault::Balance(2.0),
    },
    Planted {
        name: "the gradient of a bias is multiplied by the axis",
        model: GPT2,
        axes: CONTEXT,
        is_faulty: |op| matches!(op, Op::Linear(Linear::ColumnSums { .. })),
        fault: Fault::Scaled(0, 2.0),
    },
    Planted {
        name: "gradients of positions after the cut are lost",
        model: LLAMA,
        axes: CONTEXT,
        is_faulty: |op| matches!(op, Op::Attention(Attention::Backward { .. })),
        fault: Fault::Cut(0, 2),
    },
    Planted {
        name: "a weight that all positions share has a partial gradient",
        model: LLAMA,
        axes: CONTEXT,
        is_faulty: |op| matches!(op, Op::Norm(Norm::RmsBackward { .. })),
        fault: Fault::Scaled(1, 0.5),
    },
    Planted {
        name: "rotary positions are turned back by those of the first chunk",
        model: LLAMA,
        axes: CONTEXT,
        is_faulty: |op| matches!(op, Op::Attention(Attention::Rope { backward: true, .. })),
        fault: Fault::Scaled(0, -1.0),
    },
    Planted {
        name: "the gradient below the head is a mean over ranks, and that of the head a sum",
        model: LLAMA,
        axes: CONTEXT,
        is_faulty: |op| matches!(op, Op::Head(Head::LossBackward { .. })),
        fault: Fault::Scaled(2, 0.5),
    },
];

/// Ranks as threads; those of worlds with several of them have the fault, the oracle has not.
fn ranks(planted: &'static Planted) -> Threads<Hooked<HostMemory>> {
    Threads::new(options(), move |_, world| {
        let hook = move |memory: &HostMemory, op: &Op, mut operands: Operands<'_, '_, HostBuffer>| {
            if world == 1 || !(planted.is_faulty)(op) {
                return memory.execute(op, operands);
            }
            if let Fault::Overwritten = planted.fault {
                operands.writes.iter_mut().for_each(|write| write.accumulate = false);
            }
            let mut op = op.clone();
            if let (Fault::Balance(factor), Op::Experts(Experts::RouteBackward { terms: Some(terms), .. })) =
                (planted.fault, &mut op)
            {
                *terms = RouterTerms { balance: terms.balance * factor, ..*terms };
            }
            let outcome = memory.execute(&op, operands.reborrow())?;
            match planted.fault {
                Fault::Scaled(result, factor) => {
                    let to = operands.writes[result].slice.reborrow();
                    memory.compute(Queue::Compute, Arithmetic::Scale(factor), to)?;
                }
                Fault::Cut(result, parts) => {
                    let SliceMut { buffer, offset, len } = operands.writes[result].slice.reborrow();
                    let lost = len / parts;
                    memory.zero(Queue::Compute, SliceMut::new(buffer, offset + len - lost, lost))?;
                }
                Fault::Balance(_) | Fault::Overwritten => {}
            }
            Ok(outcome)
        };
        let inner = HostMemory::new(HostOptions::default())?;
        Ok(Arc::new(Hooked::new(inner, Arc::new(hook))))
    })
}

#[test]
fn errors_that_losses_do_not_show_are_found() {
    for planted in &ALL {
        let name = planted.name;
        let (model, vocab) = match planted.model {
            MIXTRAL => (expert_axis::model(MIXTRAL), 61),
            GPT2 => (GPT2.to_owned(), 53),
            other => (other.to_owned(), 61),
        };
        for axis in planted.axes {
            let name = format!("{name}, {axis}");
            let dir = tempfile::tempdir().unwrap();
            let mesh = format!("fsdp.mesh={{ {axis} }}");
            let settings = ["data.seq_len=8", &mesh, "fsdp.param_dtype=\"f32\""];
            let job = job(&model, config(dir.path(), vocab, &settings));
            let report = verify(&job, &ranks(planted), &VerifyOptions::new(&[4], 3)).unwrap();
            let world = &report.worlds[0];
            assert!(!world.failures.is_empty(), "{name}: not found");
            assert!(world.gradients.differing > 0, "{name}: {:?}", world.failures);
            assert_eq!(world.losses[0], report.oracle_losses[0], "{name}: forward is right");
            for (got, want) in world.losses.iter().zip(&report.oracle_losses) {
                assert!((got - want).abs() < 0.01 * want, "{name}: the loss shows it: {got}, not {want}");
            }
        }
    }
}
