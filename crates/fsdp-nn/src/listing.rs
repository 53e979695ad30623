//! Lists the operations of a model's block calls, for display, cost estimates and compilation.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::BlockCall;

use crate::accounting::{Account, Lease};
use crate::footprint::RunShape;
use crate::graph::{self, Counting, Decl, List, Operand, Runner, Step};
use crate::model::{Architecture, Blocks};
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
        let ends: String = step.ends.iter().map(|place| format!(" %{place}")).collect();
        let ends = if ends.is_empty() { ends } else { format!("; ends{ends}") };
        format!("{}({}) -> {}{ends}", of.name, reads.join(", "), writes.join(", "))
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

/// A runner that records lists instead of running them.
struct Recorder {
    counting: Counting,
    recorded: Option<Listing>,
}

impl Runner for Recorder {
    type Handle = Arc<Lease>;

    fn begin(&mut self, list: &List, places: &[Decl]) {
        self.recorded = Some(Listing { places: places.to_vec(), list: list.clone() });
    }

    fn allocate(&mut self, decl: &Decl) -> Result<Arc<Lease>, Error> {
        self.counting.allocate(decl)
    }

    fn run(&mut self, call: &graph::Call, places: &mut [Option<Arc<Lease>>]) -> Result<(), Error> {
        self.counting.run(call, places)
    }
}

/// Returns the listing of each call of one micro-batch.
///
/// # Errors
/// Those of the model: operations that do not fit each other, or calls out of order.
pub fn listings<A: Architecture + Clone>(
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
    calls: &[BlockCall],
) -> Result<Vec<Listing>, Error> {
    let mut blocks: Blocks<A, Arc<Lease>> = Blocks::new(architecture.clone(), spec.clone());
    let mut recorder = Recorder { counting: Counting(Arc::<Account>::default()), recorded: None };
    let listing = |call: &BlockCall| {
        blocks.call(*call, shape.of(*call), &mut recorder)?;
        Ok(recorder.recorded.take().expect("a call of a block walks a list"))
    };
    calls.iter().map(listing).collect()
}
