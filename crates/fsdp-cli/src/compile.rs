//! `fsdp compile`: a step as XLA compiles it, for devices that need not be here.

mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::Rank;
use fsdp_core::plan::Plan;
use fsdp_nn::HostMemory;
use fsdp_nn::model::Architecture as _;
use fsdp_nn::op::Cost;
use fsdp_train::config::Resolved;
use fsdp_train::{TrainError, draft, expect_positions, listed, plan, predict, step_ahead};
use fsdp_xla::{Program, Setting, Target, Told, Tracer, XlaError, XlaMemory};

use crate::args::{CompileArgs, RunFileArgs};
use crate::error::CliError;
use crate::run_setup::{Model, RunSetup};
use crate::units::bytes;
use crate::{host, logging, output, xla};
use report::Compiled;

/// Compiles the step of a run file for a topology, and says what XLA makes of it.
///
/// # Errors
/// [`CliError`]: the input is wrong, or XLA does not take the program.
pub(crate) fn run(args: &CompileArgs) -> Result<(), CliError> {
    logging::install(None)?;
    let target = target(args)?;
    let ranks = args.ranks.unwrap_or(target.devices());
    if ranks > target.devices() {
        return Err(too_few(args, &target, ranks));
    }
    let setup = RunSetup::load(&with(&args.run, &[format!("run.ranks={ranks}"), DEVICE.to_owned()]))?;
    let (config, model) = (&setup.config, setup.build()?);
    expect_positions(config, &model)?;
    let plan = Arc::new(plan(config, &model.description().spec, false)?);
    let begin = Instant::now();
    let program = trace(config, &model, &plan)?;
    let traced = begin.elapsed();
    if config.run.xla.scan_layers && !program.is_scanned {
        output::warning(&Told::NotScanned.to_string());
    }
    if let Some(file) = &args.dump {
        std::fs::write(file, &program.text).map_err(CliError::write(file))?;
    }
    let predicted_bytes = predicted(config, &model, &plan)?;
    let report = target.compile(&program).map_err(|error| match error {
        XlaError::Memory { message } => {
            let short = short_of_memory(config, &model, &target, predicted_bytes, &message);
            CliError::AheadMemory(Box::new(short))
        }
        source => CliError::Ahead { topology: args.topology.clone(), source },
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
    output::print(&if args.json { format!("{:#}\n", compiled.json()) } else { compiled.text() })
}

/// What the run file is changed to.
const DEVICE: &str = "run.device=\"xla\"";

/// A run file with more changes.
fn with(run: &RunFileArgs, changes: &[String]) -> RunFileArgs {
    let overrides = run.overrides.iter().chain(changes).cloned().collect();
    RunFileArgs { overrides, ..run.clone() }
}

/// The devices that the arguments name.
fn target(args: &CompileArgs) -> Result<Target, CliError> {
    let refused = |error: XlaError| {
        let option = if matches!(error, XlaError::Topology { .. }) { "--topology" } else { "--plugin" };
        CliError::Option { option, what: error.to_string() }
    };
    let plugin = match &args.plugin {
        Some(plugin) => fsdp_xla::plugin_named(plugin).map_err(refused)?,
        None => xla::plugin(&RunSetup::read(&args.run, &|_| 1)?.0.config.run).map_err(refused)?,
    };
    let options = args.topology_options.iter().map(|option| setting(option)).collect::<Result<_, _>>()?;
    Target::open(&plugin, &args.topology, options).map_err(refused)
}

/// `KEY=VALUE`: a number, a text, or with `@` in front the text of a file.
fn setting(option: &str) -> Result<(String, Setting), CliError> {
    let Some((key, value)) = option.split_once('=') else {
        let what = format!("{option}: expected KEY=VALUE");
        return Err(CliError::Option { option: "--topology-option", what });
    };
    let value = match (value.strip_prefix('@'), value.parse()) {
        (Some(file), _) => {
            let file = PathBuf::from(file);
            let text = std::fs::read_to_string(&file);
            Setting::Text(text.map_err(|source| CliError::ReadFile { file, source })?)
        }
        (None, Ok(number)) => Setting::Number(number),
        (None, Err(_)) => Setting::Text(value.to_owned()),
    };
    Ok((key.to_owned(), value))
}

fn too_few(args: &CompileArgs, target: &Target, ranks: usize) -> CliError {
    let (devices, kind) = (target.devices(), target.kind());
    let what = format!("{ranks} ranks need as many devices, and {} has {devices} ({kind})", args.topology);
    CliError::Option { option: "--ranks", what }
}

/// The program of a step.
fn trace(config: &Resolved, model: &Model, plan: &Arc<Plan>) -> Result<Program, CliError> {
    let tracer = Tracer::new(xla::form(&config.run), host::world_options(&config.run, false));
    let step = |seat: Seat<XlaMemory>| step_ahead(config, model, plan, seat);
    tracer.launch(plan.mesh.world(), &step).map_err(TrainError::from)?;
    Ok(tracer.into_program().expect("the first rank writes its step down"))
}

/// Bytes of a rank's device, as the ledger predicts them.
fn predicted(config: &Resolved, model: &Model, plan: &Plan) -> Result<u64, CliError> {
    Ok(predict::<HostMemory, _>(config, model, plan, Rank(0))?.device.total_peak_bytes as u64)
}

/// What the operations of a rank's step cost, in closed form.
fn cost(config: &Resolved, model: &Model, plan: &Plan) -> Result<Cost, CliError> {
    let (shape, calls) = listed(config, model, plan)?;
    Ok(calls.iter().map(|(_, listing)| listing.cost(shape)).sum::<Cost>() * plan.step.rounds as u64)
}

/// A step that does not fit.
#[derive(Debug)]
pub(crate) struct ShortOfMemory {
    message: String,
    kind: String,
    predicted_bytes: u64,
    device_bytes: Option<u64>,
    /// Samples of a micro-batch that would fit by the ledger, with what they take.
    fitting: Option<(usize, u64)>,
}

impl std::fmt::Display for ShortOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the step does not fit into the memory of a {}", self.kind)?;
        if let Some(has) = self.device_bytes {
            write!(f, ", {}", bytes(has))?;
        }
        write!(f, "; the ledger predicts {}", bytes(self.predicted_bytes))?;
        if let Some((samples, needed)) = self.fitting {
            let needed = bytes(needed);
            write!(f, ", and {needed} with train.micro_batch_size = {samples}: try that")?;
        }
        write!(f, ". XLA says: {}", self.message)
    }
}

/// Lines of what XLA says that are shown.
const LINES: usize = 4;

fn short_of_memory(
    config: &Resolved,
    model: &Model,
    target: &Target,
    predicted_bytes: u64,
    message: &str,
) -> ShortOfMemory {
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    let message = lines.take(LINES).collect::<Vec<_>>().join(" ");
    let device_bytes = target.memory();
    // XLA has just needed more than the device has: what the ledger takes for as much is no way out.
    let most = device_bytes.map(|most| most.min(predicted_bytes.saturating_sub(1)));
    let fitting = most.and_then(|most| fitting(config, model, most));
    ShortOfMemory { message, kind: target.kind().to_owned(), predicted_bytes, device_bytes, fitting }
}

/// The largest half, quarter, .. of a micro-batch whose step takes at most so many bytes by the ledger, with what it takes.
fn fitting(config: &Resolved, model: &Model, most_bytes: u64) -> Option<(usize, u64)> {
    let mut config = config.clone();
    while config.train.micro_batch_size > 1 {
        config.train.micro_batch_size /= 2;
        let plan = draft(&config, &model.description().spec).ok()?;
        let needed = predicted(&config, model, &plan).ok()?;
        if needed <= most_bytes {
            return Some((config.train.micro_batch_size, needed));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use fsdp_nn::hf::HfConfig;
    use fsdp_train::adapter;

    use super::*;

    const RUN: &str = r#"
        [model]
        path = "unused"
        [data]
        train = ["unused"]
        format = "text"
        seq_len = 64
        [train]
        steps = 1
        micro_batch_size = 16
        global_batch_size = 64
        optimizer = { name = "adamw", lr = 1e-3 }
        lr_schedule = { name = "constant" }
        [run]
        ranks = 4
        out_dir = "unused"
    "#;
    const MODEL: &str = r#"{
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "initializer_range": 0.02
    }"#;

    #[test]
    fn a_smaller_micro_batch_that_fits_is_named() {
        let config = Resolved::parse(RUN, "test", &[]).unwrap().config;
        let model = adapter::adapt(&config, HfConfig::parse(MODEL).unwrap().build().unwrap()).unwrap();
        let of = |samples: usize| {
            let mut config = config.clone();
            config.train.micro_batch_size = samples;
            predicted(&config, &model, &draft(&config, &model.description().spec).unwrap()).unwrap()
        };
        assert_eq!(fitting(&config, &model, of(8)), Some((8, of(8))));
        assert_eq!(fitting(&config, &model, of(8) - 1), Some((4, of(4))));
        assert_eq!(fitting(&config, &model, of(1) - 1), None);
        let mut short = ShortOfMemory {
            message: "Used 26.01G of 15.75G hbm".to_owned(),
            kind: "TPU v5 lite".to_owned(),
            predicted_bytes: 20 << 30,
            device_bytes: Some(16 << 30),
            fitting: Some((8, 10 << 30)),
        };
        assert_eq!(
            short.to_string(),
            "the step does not fit into the memory of a TPU v5 lite, 16.0 GiB; the ledger predicts 20.0 GiB, and 10.0 GiB \
             with train.micro_batch_size = 8: try that. XLA says: Used 26.01G of 15.75G hbm"
        );
        (short.device_bytes, short.fitting) = (None, None);
        assert_eq!(
            short.to_string(),
            "the step does not fit into the memory of a TPU v5 lite; the ledger predicts 20.0 GiB. XLA says: Used 26.01G of \
             15.75G hbm"
        );
    }

    #[test]
    fn options_of_topologies_are_numbers_texts_or_files() {
        assert_eq!(setting("a=3").unwrap(), ("a".to_owned(), Setting::Number(3)));
        assert_eq!(setting("a=1x1x4").unwrap(), ("a".to_owned(), Setting::Text("1x1x4".to_owned())));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "text").unwrap();
        let read = setting(&format!("a=@{}", file.path().display())).unwrap();
        assert_eq!(read, ("a".to_owned(), Setting::Text("text".to_owned())));
        assert!(matches!(setting("a=@/nowhere").unwrap_err(), CliError::ReadFile { .. }));
    }
}
