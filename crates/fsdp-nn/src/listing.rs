//! Lists the operations of a model's block calls, for display, cost estimates and compilation.

use fsdp_core::Error;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::{BlockCall, Pass};

use crate::footprint::RunShape;
use crate::graph::{Decl, List, Operand, Step};
use crate::model::{Architecture, MicroBatchPlan, PlannedCall};
use crate::op::{Cost, Role};

/// The operations of one block call.
#[derive(Clone, Debug, PartialEq)]
pub struct Listing {
    /// The places (buffers) of the block.
    pub places: Vec<Decl>,
    /// The calls of operations over these places.
    pub list: List,
}

impl Listing {
    /// Returns the total cost.
    pub fn cost(&self, shape: RunShape) -> Cost {
        self.list.steps.iter().map(|step| step.call.cost(shape.dtype, shape.gradient_dtype)).sum()
    }

    /// Formats a step: the operation, its reads and writes, and the places that end with it.
    pub fn describe(&self, step: &Step, spec: &ModelSpec, block: BlockId) -> String {
        let of = step.call.op.describe();
        let operand = |(role, operand): (&Role, &Operand)| {
            format!("{}={}", role.name, self.operand(*operand, spec, block))
        };
        let reads: Vec<String> = of.reads.iter().zip(&step.call.reads).map(operand).collect();
        let write = |(role, (to, adds)): (&Role, &(Operand, bool))| {
            format!("{}{}", operand((role, to)), if *adds { " +=" } else { "" })
        };
        let writes: Vec<String> = of.writes.iter().zip(&step.call.writes).map(write).collect();
        let arrivals: String = step.arrivals.iter().map(|place| format!(" %{place}")).collect();
        let arrivals = if arrivals.is_empty() { arrivals } else { format!("; arrived{arrivals}") };
        let ends: String = step.ends.iter().map(|place| format!(" %{place}")).collect();
        let ends = if ends.is_empty() { ends } else { format!("; ends{ends}") };
        format!("{}({}) -> {}{arrivals}{ends}", of.name, reads.join(", "), writes.join(", "))
    }

    /// Formats an operand: its name, shape and dtype.
    pub fn operand(&self, operand: Operand, spec: &ModelSpec, block: BlockId) -> String {
        let param = |index: usize| {
            let param = spec.param(spec.block(block).params[index]);
            let shape: Vec<String> = param.shape.iter().map(ToString::to_string).collect();
            format!("{}[{}]", param.fqn, shape.join("x"))
        };
        match operand {
            Operand::Local { id, offset, .. } => {
                let Decl { rows, width, dtype, .. } = self.places[id];
                let from = if offset == 0 { String::new() } else { format!(" from column {offset}") };
                format!("%{id}[{rows}x{width} {dtype}{from}]")
            }
            Operand::Param(index) => param(index),
            Operand::ParamGradient(index) => format!("gradient of {}", param(index)),
            Operand::Ids => "ids".into(),
            Operand::Positions => "positions".into(),
            Operand::Targets => "targets".into(),
            Operand::Losses => "losses".into(),
            Operand::ZLosses => "z-losses".into(),
            Operand::Load => "load".into(),
            Operand::Loads => "loads".into(),
            Operand::RouterLoss => "router loss".into(),
        }
    }
}

/// Returns the calls of a micro-batch with their listings.
///
/// # Errors
/// If operations of the model do not fit each other.
pub fn listings<A: Architecture>(
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
    pass: Pass,
) -> Result<Vec<(BlockCall, Listing)>, Error> {
    let plan = MicroBatchPlan::new(architecture, spec, shape.of(pass), pass)?;
    let listing =
        |call: &PlannedCall| Listing { places: call.plan.places.clone(), list: call.list().clone() };
    Ok(plan.calls.iter().map(|call| (call.call, listing(call))).collect())
}
