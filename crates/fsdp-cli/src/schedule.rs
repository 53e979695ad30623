//! `fsdp schedule`.

mod as_json;
mod operations;

use std::fmt::Write;
use std::io;

use fsdp_core::Rank;
use fsdp_core::checker;
use fsdp_core::layout::UnitLayout;
use fsdp_core::plan::Plan;
use fsdp_data::missing;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture;
use fsdp_train::{expect_positions, plan, predict};

use crate::args::ScheduleArgs;
use crate::error::CliError;
use crate::logging;
use crate::output::{self, Paint, table};
use crate::run_setup::RunSetup;
use crate::train::{memory_rows, parameters};
use crate::units::bytes;
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
        return Err(CliError::Rank { rank: args.rank, ranks: config.run.ranks });
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
    let mut text = schedules(&plan);
    if args.ops {
        let _ = write!(text, "\n{}\n{}", heading("operations of a micro-batch"), operations.text());
    }
    if args.costs {
        let _ = write!(text, "\n{}\n{}", heading("costs"), operations.costs());
    }
    text += &verdict(&plan);
    text += &units(&plan);
    let title = format!("predicted peak memory of rank {}", args.rank);
    let _ = write!(text, "\n{}\n{}", heading(&title), table(["category", "peak"], memory_rows(&[usage])));
    output::print(&text)?;
    for unit in plan.layout.units.iter().filter(|unit| unit.padding_factor() > PADDING_WARNING) {
        output::warning(&padding_warning(unit));
    }
    Ok(())
}

fn heading(text: &str) -> String {
    Paint::of(&io::stdout()).heading(text)
}

fn schedules(plan: &Plan) -> String {
    let (spec, layout) = (&plan.spec, &plan.layout);
    let mut text = format!(
        "{} in {} units, mesh {}, {} micro-batches per rank and step\n",
        parameters(spec),
        layout.units.len(),
        plan.mesh,
        plan.step.rounds
    );
    let _ = write!(text, "\n{}\n{}", heading("training step"), plan.step.render(spec, layout));
    if let Some(evaluation) = &plan.evaluation {
        let _ = write!(text, "\n{}\n{}", heading("evaluation"), evaluation.render(spec, layout));
    }
    text
}

/// Plans are checked when they are made; this repeats the check to report its result.
fn verdict(plan: &Plan) -> String {
    let paint = Paint::of(&io::stdout());
    let mut text = String::from("\n");
    for (name, schedule) in [("training step", Some(&plan.step)), ("evaluation", plan.evaluation.as_ref())] {
        let Some(schedule) = schedule else { continue };
        let operations = schedule.ops.len();
        let verdict = match checker::check(schedule, &plan.spec, &plan.layout) {
            Ok(()) => paint.good("safe"),
            Err(violation) => paint.bad(&format!("unsafe: {violation}")),
        };
        let _ = writeln!(text, "checker: {name} of {operations} operations is {verdict}");
    }
    text
}

fn units(plan: &Plan) -> String {
    let mut rows: Vec<[String; 5]> = Vec::new();
    let mut first = "";
    for unit in &plan.layout.units {
        let figures = unit_figures(unit, plan.policy.param_dtype.size_bytes());
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
    let header = ["unit", "segments", "unsharded", "shard", "padding"];
    format!("\n{}\n{}", heading("units"), table(header, rows))
}

fn unit_figures(unit: &UnitLayout, element_bytes: usize) -> [String; 4] {
    let unsharded: usize = unit.segments.iter().map(|segment| segment.unsharded_len()).sum();
    let shard: usize = unit.segments.iter().map(|segment| segment.shard_len()).sum();
    let size = |elements: usize| bytes((elements * element_bytes) as u64);
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
