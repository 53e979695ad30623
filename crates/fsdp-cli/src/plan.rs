//! `fsdp plan`: predicts time, memory and cost of a run on machines that are not available here.

mod ahead;
mod cost;
mod effects;
mod figures;
mod json;
mod outlook;
mod report;
mod search;
mod settings;
mod trace;

use fsdp_config::World;
use fsdp_plan::Constants;
use fsdp_plan::cluster::Cluster;

use crate::args::PlanArgs;
use crate::calibrate::read_cluster;
use crate::document::page::{Page, expect_replaceable};
use crate::document::{Report, rendered};
use crate::error::CliError;
use crate::logging;
use crate::output;
use crate::run_setup::RunSetup;
use ahead::Forecaster;
use cost::Cost;
use outlook::Outlook;

/// Predicts a step.
///
/// # Errors
/// [`CliError`]: the input is wrong, or a file cannot be written.
pub(crate) fn run(args: &PlanArgs) -> Result<(), CliError> {
    logging::install(None)?;
    output::print(&render(args)?)
}

/// Returns the text to print for a run; writes the requested files.
///
/// # Errors
/// Those of [`run`].
pub(crate) fn render(args: &PlanArgs) -> Result<String, CliError> {
    let cluster = cluster(args)?;
    if args.print_cluster {
        return Ok(cluster.to_toml());
    }
    let nodes = args.nodes.or(cluster.nodes).unwrap_or(1);
    let (mut setup, warnings) = RunSetup::read(&args.run, &|_| World {
        ranks: nodes * cluster.devices_per_node(),
        nodes: Some(nodes),
    })?;
    warnings.iter().for_each(|warning| output::warning(warning));
    settings::place(&mut setup.config, &cluster, args.nodes)?;
    let constants = Constants::fitted();
    let forecaster = Forecaster::new(&setup, &cluster, &constants)?;
    let run = forecaster.forecast(&setup.config)?;
    if let Some(file) = &args.trace {
        trace::write(&run, file)?;
    }
    if args.search {
        return search::render(&forecaster, args);
    }
    let outlook = Outlook {
        forecaster: &forecaster,
        cost: Cost::of(&run, args.tokens, args.price)?,
        recompute_factor: forecaster.recompute_factor(&run)?,
        fsdp2: forecaster.fsdp2(&run)?,
        effects: effects::of(&forecaster),
        run,
    };
    if let Some(file) = &args.report {
        expect_replaceable("--report", file)?;
        let mut page = Page::default();
        outlook.write(&mut page);
        page.write(&format!("{} on {}", outlook.run.config.model.path, cluster.name), file)?;
    }
    Ok(rendered(&outlook, args.json))
}

/// The machines that the arguments name.
fn cluster(args: &PlanArgs) -> Result<Cluster, CliError> {
    match (&args.on, &args.cluster) {
        (Some(name), _) => Ok(Cluster::known(name)?),
        (None, Some(file)) => read_cluster(file),
        (None, None) => unreachable!("clap asks for one of them"),
    }
}
