//! Reports a compiled step.

use std::fmt::Write;
use std::io;
use std::time::Duration;

use fsdp_core::plan::Plan;
use fsdp_nn::op::Cost;
use fsdp_xla::{Collective, CompileReport, Optimized, Order, Program, Target};
use serde_json::{Map, Value, json};

use crate::output::{Paint, table};
use crate::train::parameters;
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
    /// For people.
    pub(super) fn text(&self) -> String {
        let Self { target, plan, report, .. } = self;
        let paint = Paint::of(&io::stdout());
        let (major, minor) = target.api();
        let mut text = format!(
            "{} in {} units, mesh {}, {} micro-batches per rank and step\n{}: {} devices of {} (PJRT {major}.{minor})\n\
             {} in {:.1} s (traced in {:.1} s)\n",
            parameters(&plan.spec),
            plan.layout.units.len(),
            plan.mesh,
            plan.step.rounds,
            self.topology,
            target.devices(),
            target.kind(),
            paint.good("XLA compiled the step"),
            report.took.as_secs_f64(),
            self.traced.as_secs_f64(),
        );
        let _ = write!(text, "\n{}\n{}", paint.heading("operations"), self.operations());
        if let Some(Optimized { collectives, asynchronous, overlapped, .. }) = &report.optimized {
            let order = Order::of(&self.program.collectives, collectives);
            let _ = writeln!(
                text,
                "order of collectives: {order}; asynchronous: {asynchronous}, of which {overlapped} run beside products"
            );
        }
        let _ = write!(text, "\n{}\n{}", paint.heading("memory per device"), self.memory());
        let _ = write!(text, "\n{}\n{}", paint.heading("FLOPs per step and device"), self.flops());
        text
    }

    fn operations(&self) -> String {
        let optimized = self.report.optimized.as_ref();
        let cell = |number: Option<usize>| number.map_or("-".to_owned(), |number| grouped(number as u64));
        let all = (self.program.operations, optimized.map(|compiled| compiled.operations));
        let products = (self.program.products, optimized.map(|compiled| compiled.products));
        let mut rows = vec![
            ["all".to_owned(), cell(Some(all.0)), cell(all.1)],
            ["products".to_owned(), cell(Some(products.0)), cell(products.1)],
        ];
        for kind in Collective::KINDS {
            let traced_count = count(&self.program.collectives, kind);
            let compiled_count = optimized.map(|compiled| count(&compiled.collectives, kind));
            if traced_count + compiled_count.unwrap_or(0) > 0 {
                rows.push([kind.to_owned(), cell(Some(traced_count)), cell(compiled_count)]);
            }
        }
        table(["", "traced", "compiled"], rows)
    }

    fn memory(&self) -> String {
        let mut rows: Vec<[String; 2]> = Vec::new();
        let mut row = |name: &str, count: u64| rows.push([name.to_owned(), bytes(count)]);
        if let Some(memory) = &self.report.memory {
            row("arguments", memory.arguments);
            row("results not stored in arguments", memory.results.saturating_sub(memory.aliased));
            row("temporaries", memory.temporaries);
            row("code", memory.code);
            row("total", memory.total());
            if let Some(peak) = memory.peak {
                row("peak, by XLA", peak);
            }
        }
        row("peak, predicted by the ledger", self.predicted_bytes);
        if let Some(available) = self.target.memory() {
            row("memory of the device", available);
        }
        table(["", "bytes"], rows)
    }

    fn flops(&self) -> String {
        let counted = self.report.flops.map_or("not reported".to_owned(), |count| flops(count as u64));
        let count =
            if self.program.loops > 0 { "XLA's count, one round of each loop" } else { "XLA's count" };
        let rows = [
            [count.to_owned(), counted],
            ["products, in closed form".to_owned(), flops(self.cost.product_flops)],
            ["all operations, in closed form".to_owned(), flops(self.cost.flops())],
        ];
        table(["", "FLOPs"], rows)
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
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
}
