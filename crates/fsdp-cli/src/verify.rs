//! `fsdp verify`.

mod report;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use fsdp_core::Rank;
use fsdp_core::engine::{IssueOrder, ProgramOrder};
use fsdp_nn::hf::HfModel;
use fsdp_sim::SeededOrder;
use fsdp_train::Job;
use fsdp_train::verify::{VerifyOptions, VerifyReport, verify};

use crate::args::VerifyArgs;
use crate::error::CliError;
use crate::run_setup::{self, RunSetup};
use crate::{host, logging, output, shrink};

/// Verifies a run file, prints the report and returns whether every promise was kept.
///
/// # Errors
/// [`CliError`]: the input is wrong, or a run failed.
pub(crate) fn run(args: &VerifyArgs) -> Result<bool, CliError> {
    logging::install(None)?;
    let mut setup = RunSetup::load(&args.run)?;
    // Nothing is evaluated here, so evaluation data need not be read.
    setup.config.data.eval.clear();
    // A path that cannot be written is better known before the work than after it.
    let json = args.json.as_deref().map(create).transpose()?;
    let job = if args.shrink { shrunk(&setup, args)? } else { whole(&setup)? };
    let order = |rank: Rank| -> Box<dyn IssueOrder> {
        match args.order_seed {
            Some(seed) => Box::new(SeededOrder::for_rank(seed, rank.0)),
            None => Box::new(ProgramOrder),
        }
    };
    let options = VerifyOptions {
        world_sizes: args.world_sizes.clone(),
        steps: args.steps,
        order: &order,
        progress: &|world| match world {
            None => output::note(&format!("training {} steps without sharding", args.steps)),
            Some(world) => output::note(&format!("training {} steps over {world} ranks", args.steps)),
        },
    };
    let launcher = host::verification(&job.config.run, args.order_seed.is_some());
    let found = verify(&job, &launcher, &options)?;
    if let (Some(path), Some(file)) = (&args.json, json) {
        write_json(path, file, &found)?;
    }
    output::print(&report::render(&found))?;
    Ok(found.holds())
}

fn whole(setup: &RunSetup) -> Result<Job<HfModel>, CliError> {
    let architecture = setup.build()?;
    let init = setup.init(&architecture)?;
    Ok(Job::new(setup.config.clone(), architecture, init)?)
}

fn shrunk(setup: &RunSetup, args: &VerifyArgs) -> Result<Job<HfModel>, CliError> {
    let small = shrink::shrink(setup, &args.world_sizes)?;
    for note in &small.notes {
        output::note(&format!("shrunk: {note}"));
    }
    let architecture = small.setup.build()?;
    let init = run_setup::random(small.setup.config.model.seed, &architecture);
    Ok(Job::new(small.setup.config, architecture, init)?)
}

fn create(path: &Path) -> Result<File, CliError> {
    let failed = |source| CliError::Create { option: "--json", file: path.to_owned(), source };
    File::create(path).map_err(failed)
}

fn write_json(path: &Path, mut file: File, report: &VerifyReport) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(report).expect("a report has a JSON form");
    text.push('\n');
    file.write_all(text.as_bytes()).map_err(CliError::write(path))
}
