//! Reports a compiled step.

use std::time::Duration;

use fsdp_core::plan::Plan;
use fsdp_nn::op::Cost;
use fsdp_xla::{Collective, CompileReport, Optimized, Order, Program, Target};
use serde_json::{Map, Value, json};

use crate::document::{Document, Mark, Report};
use crate::train::step_of;
use crate::units::{bytes, flops, grouped};

/// A compiled step.
pub(super) struct Compiled<'a> {
    pub(super) topology: &'a str,
    pub(super) target: &'a Target,
    pub(super) plan: &'a Plan,
    pub(super) program: &'a Program,
    pub(super) traced: Duration,
    pub(super) report: &'a CompileReport,
    /// Bytes per device, as predicted by the ledger.
    pub(super) predicted_bytes: u64,
    /// The closed-form cost of a rank's step.
    pub(super) cost: Cost,
}

fn count(collectives: &[Collective], kind: &str) -> usize {
    collectives.iter().filter(|collective| collective.kind == kind).count()
}

impl Compiled<'_> {
    fn operations(&self) -> Vec<[String; 3]> {
        let optimized = self.report.optimized.as_ref();
        let cell = |number: Option<usize>| number.map_or("-".to_owned(), |number| grouped(number as u64));
        let row = |name: &str, traced: usize, compiled: Option<usize>| {
            [name.to_owned(), cell(Some(traced)), cell(compiled)]
        };
        let mut rows = vec![
            row("all", self.program.operations, optimized.map(|compiled| compiled.operations)),
            row("products", self.program.products, optimized.map(|compiled| compiled.products)),
        ];
        for kind in Collective::KINDS {
            let traced = count(&self.program.collectives, kind);
            let compiled = optimized.map(|compiled| count(&compiled.collectives, kind));
            if traced + compiled.unwrap_or(0) > 0 {
                rows.push(row(kind, traced, compiled));
            }
        }
        rows
    }

    fn memory(&self) -> Vec<[String; 2]> {
        let mut rows = Vec::new();
        if let Some(memory) = &self.report.memory {
            rows = vec![
                ("arguments", memory.arguments),
                ("results not stored in arguments", memory.results.saturating_sub(memory.aliased)),
                ("temporaries", memory.temporaries),
                ("code", memory.code),
                ("total", memory.total()),
            ];
            rows.extend(memory.peak.map(|peak| ("peak, by XLA", peak)));
        }
        rows.push(("peak, predicted by the ledger", self.predicted_bytes));
        rows.extend(self.target.memory().map(|available| ("memory of the device", available)));
        rows.into_iter().map(|(name, count)| [name.to_owned(), bytes(count)]).collect()
    }

    fn flops(&self) -> [[String; 2]; 3] {
        let counted = self.report.flops.map_or("not reported".to_owned(), |count| flops(count as u64));
        let count =
            if self.program.loops > 0 { "XLA's count, one round of each loop" } else { "XLA's count" };
        [
            [count.to_owned(), counted],
            ["products, in closed form".to_owned(), flops(self.cost.product_flops)],
            ["all operations, in closed form".to_owned(), flops(self.cost.flops())],
        ]
    }
}

impl Report for Compiled<'_> {
    fn json(&self) -> Value {
        let Self { target, plan, program, report, cost, .. } = self;
        let kinds = |collectives: &[Collective]| -> Map<String, Value> {
            let counted = Collective::KINDS.into_iter().map(|kind| (kind, count(collectives, kind)));
            counted
                .filter(|(_, count)| *count > 0)
                .map(|(kind, count)| (kind.to_owned(), count.into()))
                .collect()
        };
        let optimized = report.optimized.as_ref().map(|compiled| {
            let order = Order::of(&program.collectives, &compiled.collectives);
            json!({
                "operations": compiled.operations,
                "products": compiled.products,
                "collectives": kinds(&compiled.collectives),
                "asynchronous_collectives": compiled.asynchronous,
                "overlapped_collectives": compiled.overlapped,
                "order_of_schedule": matches!(order, Order::Same),
            })
        });
        let memory = report.memory.map(|memory| {
            json!({
                "arguments_bytes": memory.arguments,
                "results_bytes": memory.results,
                "aliased_bytes": memory.aliased,
                "temporaries_bytes": memory.temporaries,
                "code_bytes": memory.code,
                "total_bytes": memory.total(),
                "peak_bytes": memory.peak,
            })
        });
        json!({
            "topology": self.topology,
            "device": target.kind(),
            "devices": target.devices(),
            "device_bytes": target.memory(),
            "ranks": plan.mesh.world(),
            "parameters": plan.spec.elements(),
            "traced_seconds": self.traced.as_secs_f64(),
            "compiled_seconds": report.took.as_secs_f64(),
            "program": { "operations": program.operations, "products": program.products, "loops": program.loops,
                "collectives": kinds(&program.collectives) },
            "optimized": optimized,
            "memory": memory,
            "predicted_peak_bytes": self.predicted_bytes,
            "flops": report.flops,
            "closed_form_product_flops": cost.product_flops,
            "closed_form_flops": cost.flops(),
        })
    }

    fn write(&self, to: &mut dyn Document) {
        let Self { target, report, .. } = self;
        let (major, minor) = target.api();
        to.line(&step_of(self.plan));
        to.line(&format!(
            "{}: {} devices of {} (PJRT {major}.{minor})",
            self.topology,
            target.devices(),
            target.kind()
        ));
        let (took, traced) = (report.took.as_secs_f64(), self.traced.as_secs_f64());
        to.marked(Mark::Good, "XLA compiled the step", &format!(" in {took:.1} s (traced in {traced:.1} s)"));
        to.section("operations");
        to.table(["", "traced", "compiled"], self.operations());
        if let Some(Optimized { collectives, asynchronous, overlapped, .. }) = &report.optimized {
            let order = Order::of(&self.program.collectives, collectives);
            to.line(&format!(
                "order of collectives: {order}; asynchronous: {asynchronous}, of which {overlapped} run beside products"
            ));
        }
        to.section("memory per device");
        to.table(["", "bytes"], self.memory());
        to.section("FLOPs per step and device");
        to.table(["", "FLOPs"], self.flops());
    }
}
