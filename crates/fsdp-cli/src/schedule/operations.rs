//! The operations of block calls and their cost: `fsdp schedule --ops`, `--costs` and `--json`.

use std::fmt::Write;

use fsdp_config::Resolved;
use fsdp_core::Rank;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::plan::Plan;
use fsdp_core::program::{BlockCall, ForwardMode};
use fsdp_core::update::{Products, RankTables};
use fsdp_nn::HostMemory;
use fsdp_nn::footprint::RunShape;
use fsdp_nn::graph::{Operand, Step};
use fsdp_nn::listing::Listing;
use fsdp_nn::op::{Cost, Role};
use fsdp_train::{TrainError, listed, rank_tables};
use serde_json::{Value, json};

use super::as_json;
use crate::document::Document;
use crate::run_setup::Model;
use crate::units::{bytes, flops};

/// The calls of a micro-batch, grouped by equal operations.
pub(super) struct Operations<'a> {
    spec: &'a ModelSpec,
    /// The schedules of the run, as JSON.
    schedules: Value,
    shape: RunShape,
    rounds: usize,
    kinds: Vec<Kind>,
    /// The cost of products in a rank's updates.
    update: Cost,
}

/// Block calls with the same operations.
struct Kind {
    calls: Vec<BlockCall>,
    listing: Listing,
}

impl<'a> Operations<'a> {
    /// The operations of a training step, and the updates of a rank.
    pub(super) fn new(
        config: &Resolved,
        architecture: &Model,
        plan: &'a Plan,
        rank: Rank,
    ) -> Result<Self, TrainError> {
        let (shape, listed) = listed(config, architecture, plan)?;
        let mut kinds: Vec<Kind> = Vec::new();
        for (call, listing) in listed {
            let alike =
                |kind: &&mut Kind| call_name(kind.calls[0]) == call_name(call) && kind.listing == listing;
            match kinds.iter_mut().find(alike) {
                Some(kind) => kind.calls.push(call),
                None => kinds.push(Kind { calls: vec![call], listing }),
            }
        }
        let tables = rank_tables::<HostMemory>(config, plan, rank)?;
        let (update, schedules) = (updates(plan, &tables), as_json::schedules(plan, &tables));
        Ok(Self { spec: &plan.spec, schedules, shape, rounds: plan.step.rounds, kinds, update })
    }

    /// Lists every operation of every call, with operands, shapes and dtypes.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for kind in &self.kinds {
            let _ = writeln!(text, "{} of {}", call_name(kind.calls[0]), self.names(kind));
            for step in &kind.listing.list.steps {
                let line = kind.listing.describe(step, self.spec, kind.calls[0].block());
                let _ = writeln!(text, "  {line}");
            }
        }
        text
    }

    /// FLOPs and memory traffic by kind of call, and of the step.
    pub(super) fn write_costs(&self, to: &mut dyn Document) {
        let mut rows: Vec<[String; 6]> = Vec::new();
        for kind in &self.kinds {
            let cost = kind.listing.cost(self.shape);
            let name = format!("{} of {}", call_name(kind.calls[0]), self.names(kind));
            rows.push(row(name, &kind.calls.len().to_string(), cost));
        }
        let tokens = (self.rounds * self.shape.samples * self.shape.seq) as u64;
        let step = self.step();
        rows.push(row("the step of a rank".into(), "", step));
        if self.update.product_flops > 0 {
            rows.push(row("products of its updates".into(), "", self.update));
        }
        to.table(["calls", "a micro-batch", "products", "other", "bytes", "FLOPs a byte"], rows);
        to.line(&format!("products for each token: {}", flops(step.product_flops / tokens)));
    }

    /// All operations and costs as JSON.
    pub(super) fn json(&self) -> Value {
        let kind = |kind: &Kind| {
            let names: Vec<&str> = self.block_names(kind).collect();
            let block = kind.calls[0].block();
            let steps = kind.listing.list.steps.iter().map(|step| self.step_json(kind, step, block));
            json!({
                "call": call_name(kind.calls[0]),
                "blocks": names,
                "operations": steps.collect::<Vec<_>>(),
                "cost": cost_json(kind.listing.cost(self.shape)),
            })
        };
        json!({
            "micro_batches": self.rounds,
            "calls": self.kinds.iter().map(kind).collect::<Vec<_>>(),
            "step_cost": cost_json(self.step()),
            "update_products_cost": cost_json(self.update),
            "schedules": self.schedules,
        })
    }

    fn step_json(&self, kind: &Kind, step: &Step, block: BlockId) -> Value {
        let of = step.call.op.describe();
        let operand = |(role, operand): (&Role, &Operand)| json!({ "role": role.name, "operand": kind.listing.operand(*operand, self.spec, block) });
        let reads: Vec<Value> = of.reads.iter().zip(&step.call.reads).map(operand).collect();
        let written = step.call.writes.iter().map(|(operand, _)| operand);
        let writes: Vec<Value> = of.writes.iter().zip(written).map(operand).collect();
        json!({
            "op": of.name,
            "reads": reads,
            "writes": writes,
            "adds": step.call.writes.iter().any(|(_, adds)| *adds),
            "begins": step.begins,
            "arrivals": step.arrivals,
            "ends": step.ends,
            "matmul": of.matmul,
            "cost": cost_json(step.call.cost(self.shape.dtype, self.shape.gradient_dtype)),
        })
    }

    /// The cost of all micro-batches of a rank.
    fn step(&self) -> Cost {
        let cost = |kind: &Kind| kind.listing.cost(self.shape) * kind.calls.len() as u64;
        self.kinds.iter().map(cost).sum::<Cost>() * self.rounds as u64
    }

    fn block_names(&self, kind: &Kind) -> impl Iterator<Item = &str> {
        kind.calls.iter().map(|call| self.spec.block(call.block()).name.as_str())
    }

    fn names(&self, kind: &Kind) -> String {
        let mut names: Vec<&str> = self.block_names(kind).collect();
        match names.len() {
            0..=2 => names.join(", "),
            count => {
                names.truncate(2);
                format!("{} and {} more", names.join(", "), count - 2)
            }
        }
    }
}

/// The cost of products in a rank's updates.
fn updates(plan: &Plan, tables: &RankTables) -> Cost {
    let bytes = plan.policy.param_dtype.master().size_bytes();
    let cost = |&products: &Products| {
        let Products { m, n, k, count } = products;
        let elements = |elements: usize| (count * elements * bytes) as u64;
        Cost {
            product_flops: u64::try_from(products.flops()).unwrap_or(u64::MAX),
            other_flops: 0,
            bytes_read: elements(m * k + k * n),
            bytes_written: elements(m * n),
        }
    };
    plan.layout.unit_ids().flat_map(|unit| &tables.unit(unit).products).map(cost).sum()
}

fn call_name(call: BlockCall) -> &'static str {
    match call {
        BlockCall::Forward(_, ForwardMode::Record) => "forward",
        BlockCall::Forward(_, ForwardMode::Checkpoint) => "forward keeping nothing",
        BlockCall::Forward(_, ForwardMode::CheckpointProducts) => "forward keeping products",
        BlockCall::Forward(_, ForwardMode::Recompute) => "second forward",
        BlockCall::Forward(_, ForwardMode::Evaluate) => "forward of evaluation",
        BlockCall::ForwardBackward(_) => "forward, loss and backward",
        BlockCall::Evaluate(_) => "forward and loss",
        BlockCall::Backward(_) => "backward",
    }
}

fn row(name: String, count: &str, cost: Cost) -> [String; 6] {
    [
        name,
        count.to_owned(),
        flops(cost.product_flops),
        flops(cost.other_flops),
        bytes(cost.bytes()),
        format!("{:.1}", cost.intensity()),
    ]
}

fn cost_json(cost: Cost) -> Value {
    json!({
        "product_flops": cost.product_flops,
        "other_flops": cost.other_flops,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
        "flops_per_byte": cost.intensity(),
    })
}
