//! `fsdp compile`: compiles a step with XLA for devices that need not be present.

mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_config::{Resolved, World};
use fsdp_core::plan::Plan;
use fsdp_nn::model::Architecture as _;
use fsdp_nn::op::Cost;
use fsdp_train::{TrainError, expect_positions, listed, plan, trace_step};
use fsdp_xla::{Program, ProgramEvent, Setting, Target, Tracer, XlaError, XlaMemory};

use crate::args::{CompileArgs, RunFileArgs};
use crate::device::{host, xla};
use crate::document::print;
use crate::error::CliError;
use crate::out_of_memory_report::{OutOfMemoryReport, predicted};
use crate::run_setup::{Model, RunSetup};
use crate::{logging, output};
use report::Compiled;

/// Compiles the step of a run file for a topology, and reports the result.
///
/// # Errors
/// [`CliError`]: the input is wrong, or XLA rejects the program.
pub(crate) fn run(args: &CompileArgs) -> Result<(), CliError> {
    logging::install(None)?;
    let target = target(args)?;
    let ranks = args.ranks.unwrap_or(target.devices());
    if ranks > target.devices() {
        return Err(too_few(args, &target, ranks));
    }
    let setup =
        RunSetup::load(&with_overrides(&args.run, &[format!("run.ranks={ranks}"), DEVICE.to_owned()]))?;
    let (config, model) = (&setup.config, setup.build()?);
    expect_positions(config, &model)?;
    let plan = Arc::new(plan(config, &model.description().spec, false)?);
    let begin = Instant::now();
    let program = trace(config, &model, &plan, &target)?;
    let traced = begin.elapsed();
    if config.run.xla.scan_layers && !program.is_scanned {
        output::warning(&ProgramEvent::NotScanned.to_string());
    }
    if let Some(file) = &args.dump {
        std::fs::write(file, &program.text).map_err(CliError::write(file))?;
    }
    let predicted_bytes = predicted(config, &model, &plan)?;
    let report =
        target.compile(&program).map_err(|source| match OutOfMemoryReport::of(config, &model, &source) {
            Some(report) => CliError::Input(report.to_string()),
            None => CliError::Compile { topology: args.topology.clone(), source },
        })?;
    let cost = cost(config, &model, &plan)?;
    let compiled = Compiled {
        topology: &args.topology,
        target: &target,
        plan: &plan,
        program: &program,
        traced,
        report: &report,
        predicted_bytes,
        cost,
    };
    print(&compiled, args.json)
}

/// The override of the run file.
const DEVICE: &str = "run.device=\"xla\"";

/// A run file with additional overrides.
fn with_overrides(run: &RunFileArgs, added: &[String]) -> RunFileArgs {
    let overrides = run.overrides.iter().chain(added).cloned().collect();
    RunFileArgs { overrides, ..run.clone() }
}

/// Opens the topology that the arguments name.
fn target(args: &CompileArgs) -> Result<Target, CliError> {
    let refused = |error: XlaError| {
        let option = match error {
            XlaError::Topology { .. } => "--topology",
            XlaError::TopologyOptions { .. } => "--topology-option",
            _ => "--plugin",
        };
        CliError::Option { option, what: error.to_string() }
    };
    let plugin = match &args.plugin {
        Some(plugin) => xla::plugin_named(plugin).map_err(refused)?,
        None => xla::plugin(&RunSetup::read(&args.run, &|_| World::of_ranks(1))?.0.config.run.xla)
            .map_err(refused)?,
    };
    let options = args.topology_options.iter().map(|option| setting(option)).collect::<Result<_, _>>()?;
    Target::open(&plugin, &args.topology, options).map_err(refused)
}

/// Parses `KEY=VALUE`: a number, a text, or after `@` the name of a file with the text.
fn setting(option: &str) -> Result<(String, Setting), CliError> {
    let Some((key, value)) = option.split_once('=') else {
        let what = format!("{option}: expected KEY=VALUE");
        return Err(CliError::Option { option: "--topology-option", what });
    };
    let value = match (value.strip_prefix('@'), value.parse()) {
        (Some(file), _) => {
            let file = PathBuf::from(file);
            let text = std::fs::read_to_string(&file);
            Setting::Text(text.map_err(CliError::read(&file))?)
        }
        (None, Ok(number)) => Setting::Number(number),
        (None, Err(_)) => Setting::Text(value.to_owned()),
    };
    Ok((key.to_owned(), value))
}

fn too_few(args: &CompileArgs, target: &Target, ranks: usize) -> CliError {
    let (devices, kind) = (target.devices(), target.kind());
    let what = format!("{ranks} ranks need as many devices, but {} has {devices} ({kind})", args.topology);
    CliError::Option { option: "--ranks", what }
}

/// Traces the program of a step for these devices.
fn trace(config: &Resolved, model: &Model, plan: &Arc<Plan>, target: &Target) -> Result<Program, CliError> {
    let options = host::world_options(&config.run, false);
    let tracer = Tracer::new(xla::form(&config.run), target.runs_in_parallel(), options);
    let step = |seat: Seat<XlaMemory>| trace_step(config, model, plan, seat);
    tracer.launch(plan.mesh.world(), &step).map_err(TrainError::from)?;
    Ok(tracer.into_program().expect("the first rank writes its step down"))
}

/// The closed-form cost of a rank's step.
fn cost(config: &Resolved, model: &Model, plan: &Plan) -> Result<Cost, CliError> {
    let (shape, calls) = listed(config, model, plan)?;
    Ok(calls.iter().map(|(_, listing)| listing.cost(shape)).sum::<Cost>() * plan.step.rounds as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topology_options_parse_as_number_text_or_file() {
        assert_eq!(setting("a=3").unwrap(), ("a".to_owned(), Setting::Number(3)));
        assert_eq!(setting("a=1x1x4").unwrap(), ("a".to_owned(), Setting::Text("1x1x4".to_owned())));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "text").unwrap();
        let read = setting(&format!("a=@{}", file.path().display())).unwrap();
        assert_eq!(read, ("a".to_owned(), Setting::Text("text".to_owned())));
        assert!(matches!(setting("a=@/nowhere").unwrap_err(), CliError::Read { .. }));
    }
}
