//! Schedules as JSON: buffers and operations with all operands, as part of `fsdp schedule --json`.

use fsdp_core::plan::Plan;
use fsdp_core::schedule::{BufferDecl, BufferId, Op, OpId, Place, Schedule};
use fsdp_core::update::RankTables;
use serde_json::{Value, json};

/// The training step and the evaluation, if any; lengths of optimizer state are those of one rank.
pub(super) fn schedules(plan: &Plan, tables: &RankTables) -> Value {
    let evaluation = plan.evaluation.as_ref().map(|evaluation| schedule(evaluation, plan, tables));
    json!({ "training_step": schedule(&plan.step, plan, tables), "evaluation": evaluation })
}

/// Buffers and operations are identified by their index in these lists.
fn schedule(schedule: &Schedule, plan: &Plan, tables: &RankTables) -> Value {
    let buffers: Vec<Value> = schedule.buffers.iter().map(|decl| buffer(decl, plan, tables)).collect();
    let operations: Vec<Value> = schedule.ops.iter().map(|op| operation(op, plan)).collect();
    json!({ "buffers": buffers, "operations": operations })
}

fn buffer(decl: &BufferDecl, plan: &Plan, tables: &RankTables) -> Value {
    json!({
        "name": decl.name(),
        "unit": decl.unit.map(|unit| &plan.layout.unit(unit).name),
        "segment": decl.segment.map(|segment| segment.0),
        "dtype": decl.dtype.name(),
        "elements": decl.len_on(tables),
        "category": decl.category.name(),
        "on_host": decl.place == Place::Host,
    })
}

fn operation(op: &Op, plan: &Plan) -> Value {
    let buffers = |ids: &[BufferId]| ids.iter().map(|id| id.index()).collect::<Vec<_>>();
    let operations = |ids: &[OpId]| ids.iter().map(|id| id.0).collect::<Vec<_>>();
    json!({
        "op": op.kind.name(),
        "queue": op.kind.queue().name(),
        "unit": op.kind.unit().map(|unit| &plan.layout.unit(unit).name),
        "block": op.kind.block().map(|block| &plan.spec.block(block).name),
        "reads": buffers(&op.reads),
        "writes": buffers(&op.writes),
        "waits": operations(&op.waits),
        "joins": operations(&op.joins),
    })
}
