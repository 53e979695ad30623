//! `fsdp schedule`.

mod as_json;
mod operations;

use fsdp_core::Rank;
use fsdp_core::checker;
use fsdp_core::layout::UnitLayout;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::Schedule;
use fsdp_data::missing;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;
use fsdp_train::{expect_positions, plan, predict};

use crate::args::ScheduleArgs;
use crate::document::{Document, Mark, text};
use crate::error::CliError;
use crate::run_setup::RunSetup;
use crate::train::{memory_rows, step_of};
use crate::units::bytes;
use crate::{logging, output};
use operations::Operations;

/// Minimum ratio of unsharded elements to parameters for a warning about a unit.
const PADDING_WARNING: f64 = 1.25;

/// Prints the compiled schedule of a run file, and properties known before it runs.
///
/// # Errors
/// [`CliError`]: the input is wrong.
pub(crate) fn run(args: &ScheduleArgs) -> Result<(), CliError> {
    logging::install(None)?;
    let setup = RunSetup::load(&args.run)?;
    let (config, architecture) = (&setup.config, setup.build()?);
    if args.rank >= config.run.ranks {
        let (rank, ranks) = (args.rank, config.run.ranks);
        let last = ranks - 1;
        return Err(CliError::Input(format!(
            "--rank {rank}: the run has {ranks} ranks, so give 0 to {last}"
        )));
    }
    expect_positions(config, &architecture)?;
    for path in missing(&config.data) {
        output::warning(&format!(
            "{path} of [data] does not exist; a schedule does not need it, but a run does"
        ));
    }
    let evaluates = !config.data.eval.is_empty();
    let plan = plan(config, &architecture.description().spec, evaluates)?;
    let operations = Operations::new(config, &architecture, &plan, Rank(args.rank))?;
    if args.json {
        return output::print(&format!("{:#}\n", operations.json()));
    }
    let usage = predict::<HostMemory, _>(config, &architecture, &plan, Rank(args.rank))?;
    output::print(&text::of_stdout(|to| {
        write_schedules(&plan, to);
        if args.ops {
            to.section("operations of a micro-batch");
            to.block(&operations.text());
        }
        if args.costs {
            to.section("costs");
            operations.write_costs(to);
        }
        write_verdict(&plan, to);
        write_units(&plan, to);
        to.section(&format!("predicted peak memory of rank {}", args.rank));
        to.table(["category", "peak"], memory_rows(&[usage]));
    }))?;
    for unit in plan.layout.units.iter().filter(|unit| unit.padding_factor() > PADDING_WARNING) {
        output::warning(&padding_warning(unit));
    }
    Ok(())
}

fn write_schedules(plan: &Plan, to: &mut dyn Document) {
    to.line(&step_of(plan));
    for (name, schedule) in schedules(plan) {
        to.section(name);
        to.block(&schedule.render(&plan.spec, &plan.layout));
    }
}

/// The schedules of a plan, by name.
fn schedules(plan: &Plan) -> impl Iterator<Item = (&'static str, &Schedule)> {
    let evaluation = plan.evaluation.iter().map(|evaluation| ("evaluation", evaluation));
    std::iter::once(("training step", &plan.step)).chain(evaluation)
}

/// Plans are checked when they are made; this repeats the check to report its result.
fn write_verdict(plan: &Plan, to: &mut dyn Document) {
    to.gap();
    for (name, schedule) in schedules(plan) {
        let (mark, verdict) = match checker::check(schedule, &plan.spec, &plan.layout) {
            Ok(()) => (Mark::Good, "safe".to_owned()),
            Err(violation) => (Mark::Bad, format!("unsafe: {violation}")),
        };
        let operations = schedule.ops.len();
        to.marked(mark, "checker:", &format!(" {name} of {operations} operations is {verdict}"));
    }
}

fn write_units(plan: &Plan, to: &mut dyn Document) {
    let mut rows: Vec<[String; 5]> = Vec::new();
    let mut first = "";
    for unit in &plan.layout.units {
        let figures = unit_figures(unit);
        match rows.last_mut() {
            // Consecutive layers with equal figures share a line.
            Some(row) if row[1..] == figures => row[0] = format!("{first} to {}", unit.name),
            _ => {
                first = &unit.name;
                let [segments, unsharded, shard, padding] = figures;
                rows.push([unit.name.clone(), segments, unsharded, shard, padding]);
            }
        }
    }
    to.section("units");
    to.table(["unit", "segments", "unsharded", "shard", "padding"], rows);
}

fn unit_figures(unit: &UnitLayout) -> [String; 4] {
    let unsharded: usize = unit.segments.iter().map(|segment| segment.unsharded_bytes()).sum();
    let size = |size: usize| bytes(size as u64);
    let shard = unsharded / unit.shards;
    let padding = format!("{:.3}x", unit.padding_factor());
    [unit.segments.len().to_string(), size(unsharded), size(shard), padding]
}

fn padding_warning(unit: &UnitLayout) -> String {
    format!(
        "unit {} is padded {:.2}x: it has too few rows for the shard axis; wrap coarser (fsdp.wrap with a larger \
         class, or a larger fsdp.min_num_params) or use fewer shards (fsdp.mesh.replicate)",
        unit.name,
        unit.padding_factor()
    )
}
