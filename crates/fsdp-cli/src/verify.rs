//! `fsdp verify`.

mod report;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use fsdp_comm::launch::Launcher;
use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::place::ProcessPlace;
use fsdp_config::{Ranks, Resolved, RunConfig};
use fsdp_core::engine::{IssueOrder, ProgramOrder};
use fsdp_core::schedule::Reshard;
use fsdp_core::{Axis, Mesh, Rank};
use fsdp_nn::Backend;
use fsdp_sim::SeededOrder;
use fsdp_train::verify::{
    Promise, Skipped, Verified, VerifyOptions, VerifyReport, WorldReport, verify_together,
};
use fsdp_train::{Job, TrainError};

use crate::args::VerifyArgs;
use crate::device::{Purpose, Work};
use crate::document::{json, print};
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::run_setup::{self, Model, RunSetup};
use crate::{cluster, device, logging, output, shrink, train};

/// World sizes that are verified in one process by default.
const WORLDS: [usize; 3] = [1, 2, 4];

/// Verifies a run file and prints the report. Several processes hold the ranks together, and the first one reports; all
/// end with the same exit code.
///
/// # Errors
/// [`CliError`]: the input is wrong, or a run failed.
pub(crate) fn run(args: &VerifyArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let place = cluster::place()?;
    let mut setup = RunSetup::load(&args.run)?;
    device::expect_run(&setup.config.run)?;
    args.order_seed.map_or(Ok(()), |_| device::expect_operations(setup.config.run.device, "--order-seed"))?;
    // Nothing is evaluated here, so evaluation data need not be read.
    setup.config.data.eval.clear();
    // Fail before the work, not after it, if the file cannot be written.
    let json = args.json.as_deref().filter(|_| !cluster::is_not_first(place));
    let json = json
        .map(|path| Ok::<_, CliError>((path, File::create(path).map_err(CliError::create("--json", path))?)))
        .transpose()?;
    cut_for(&args.meshes, &mut setup.config);
    let worlds = Worlds::of(
        &setup.config,
        requested_worlds(&args.world_sizes, &args.meshes, place, setup.config.run.ranks)?,
        args.shrink,
    );
    // Processes join for the largest requested world, whatever the run file has. Worlds that do not fit the run file
    // are skipped, not started.
    let run = setup.config.run.clone();
    let joined = RunConfig { ranks: worlds.all.iter().map(|world| world.count()).max().unwrap_or(1), ..run };
    cluster::within(place, &joined, args.network, |team| {
        let verified = verify_job(args, &setup, worlds, team.map(|team| team.cluster))?;
        if let Some(report) = verified.report.filter(|_| !cluster::is_not_first(place)) {
            if let Some((path, file)) = json {
                write_json(path, file, &report)?;
            }
            print(&report, false)?;
            if args.shrink {
                other_promises(&report, &setup.config).iter().for_each(|note| output::note(note));
            }
        }
        Ok(if verified.holds { Exit::Done } else { Exit::Found })
    })
}

/// Cuts samples and experts into as many chunks as the largest axes of these meshes need, if that is more than the run file
/// has: only with equally many chunks do all meshes have the same bits.
fn cut_for(meshes: &[Mesh], config: &mut Resolved) {
    let largest = |size: fn(&Mesh) -> usize| meshes.iter().map(size).max().unwrap_or(1);
    let [context, expert] = [largest(|mesh| mesh.size(Axis::Context)), largest(|mesh| mesh.expert())];
    config.fsdp.chunks.context = Some(config.fsdp.chunks().max(context));
    config.fsdp.chunks.expert = Some(config.fsdp.expert_chunks().max(expert));
}

/// The requested worlds. Processes that were started together hold a single one.
fn requested_worlds(
    sizes: &[usize],
    meshes: &[Mesh],
    place: Option<ProcessPlace>,
    ranks: usize,
) -> Result<Vec<Ranks>, CliError> {
    let given =
        sizes.iter().copied().map(Ranks::Count).chain(meshes.iter().copied().map(Ranks::On)).collect();
    let Some(place) = place else {
        return Ok(if sizes.len() + meshes.len() == 0 { WORLDS.map(Ranks::Count).into() } else { given });
    };
    match given[..] {
        [] => Ok(vec![Ranks::Count(ranks)]),
        [world] if world.count().is_multiple_of(place.processes) => Ok(vec![world]),
        _ => {
            let what = format!(
                "{} has started {} processes, which form one world together, in equal parts: give one multiple of that, or \
                 leave it out for run.ranks = {ranks}",
                place.launched_by, place.processes
            );
            let option = if meshes.is_empty() { "--world-sizes" } else { "--meshes" };
            Err(CliError::Option { option, what })
        }
    }
}

fn verify_job(
    args: &VerifyArgs,
    setup: &RunSetup,
    worlds: Worlds,
    cluster: Option<&Cluster>,
) -> Result<Verified, CliError> {
    let job = if args.shrink { shrunk_job(args, setup, &worlds.fitting)? } else { full_job(setup)? };
    output::data_warnings(&job.data);
    let order = |rank: Rank| -> Box<dyn IssueOrder> {
        match args.order_seed {
            Some(seed) => Box::new(SeededOrder::for_rank(seed, rank.0)),
            None => Box::new(ProgramOrder),
        }
    };
    let options = VerifyOptions {
        worlds: worlds.fitting,
        steps: args.steps,
        order: &order,
        progress: &|world| match world {
            None => output::note(&format!("training {} steps without sharding", args.steps)),
            Some(mesh) => {
                let axes = if args.meshes.is_empty() { String::new() } else { format!(": {mesh}") };
                output::note(&format!("training {} steps over {} ranks{axes}", args.steps, mesh.world()));
            }
        },
    };
    let started = options.worlds.iter().filter(|&&world| job.config.at(world).is_ok());
    let ranks = started.map(|world| world.count()).max().unwrap_or(1);
    let work = Verification { job: &job, options: &options };
    let largest = RunConfig { ranks, ..job.config.run.clone() };
    let purpose = Purpose::Verification { poison: args.order_seed.is_some() };
    let outcome = device::on(&largest, purpose, cluster, work)?;
    let mut verified = outcome.map_err(|error| train::to_cli_error(&job, error))?;
    if let Some(report) = &mut verified.report {
        if args.shrink {
            add_original_setting(report, &setup.config);
        }
        report.skipped.extend(worlds.skipped);
    }
    Ok(verified)
}

/// Verifies on any device.
struct Verification<'a> {
    job: &'a Job<Model>,
    options: &'a VerifyOptions<'a>,
}

impl Work for Verification<'_> {
    type Outcome = Result<Verified, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend,
    {
        verify_together(self.job, launcher, self.options)
    }
}

/// The requested worlds.
struct Worlds {
    all: Vec<Ranks>,
    fitting: Vec<Ranks>,
    /// Worlds that the shrunk run supports, but not the original run.
    skipped: Vec<Skipped>,
}

impl Worlds {
    fn of(config: &Resolved, all: Vec<Ranks>, is_shrunk: bool) -> Self {
        let mut worlds = Self { all: all.clone(), fitting: Vec::new(), skipped: Vec::new() };
        for world in all {
            match config.at(world) {
                Err(error) if is_shrunk => {
                    worlds.skipped.push(Skipped { world: world.count(), reason: error.to_string() });
                }
                _ => worlds.fitting.push(world),
            }
        }
        worlds
    }
}

/// Adds the original setting to reasons that concern the shrunk run: users look for what they wrote.
fn add_original_setting(report: &mut VerifyReport, original: &Resolved) {
    let Reshard::ToGroup(ranks) = original.fsdp.reshard_after_forward else { return };
    for skipped in &mut report.skipped {
        if skipped.reason.contains("reshard_after_forward") {
            skipped.reason += &format!(" (--shrink made this of the run file's {ranks})");
        }
    }
}

/// Notes worlds at which the shrunk run was checked for another guarantee than the run file gives with its own ranks,
/// or at that world.
fn other_promises(report: &VerifyReport, original: &Resolved) -> Vec<String> {
    let promise = Promise::of(original).name();
    let differs = |world: &&WorldReport| world.promise != promise;
    let note = |world: &WorldReport| {
        format!(
            "world {} was checked for {}; the run file itself, with its {} ranks and {} micro-batches per step, \
             promises {promise}",
            world.world,
            world.promise,
            original.run.ranks,
            original.train.micro_batches_per_step()
        )
    };
    report.worlds.iter().filter(differs).map(note).collect()
}

fn full_job(setup: &RunSetup) -> Result<Job<Model>, CliError> {
    let architecture = setup.build()?;
    let init = setup.init(&architecture, None)?;
    Ok(Job::new(setup.config.clone(), architecture, init)?)
}

fn shrunk_job(args: &VerifyArgs, setup: &RunSetup, worlds: &[Ranks]) -> Result<Job<Model>, CliError> {
    let worlds: Vec<usize> = worlds.iter().map(|world| world.count()).collect();
    let mut small = shrink::shrink(setup, &worlds)?;
    cut_for(&args.meshes, &mut small.setup.config);
    for note in &small.notes {
        output::note(&format!("shrunk: {note}"));
    }
    let architecture = small.setup.build()?;
    let init = run_setup::random(small.setup.config.model.seed, &architecture);
    Job::new(small.setup.config, architecture, init).map_err(|error| match error {
        TrainError::Misfit { key, ref reason }
            if key.starts_with("fsdp.chunks") && !args.meshes.is_empty() =>
        {
            let what = format!("the shrunk model: {reason}; choose smaller axes, or leave out --shrink");
            CliError::Option { option: "--meshes", what }
        }
        error => error.into(),
    })
}

fn write_json(path: &Path, mut file: File, report: &VerifyReport) -> Result<(), CliError> {
    writeln!(file, "{:#}", json(report)).map_err(CliError::write(path))
}

#[cfg(test)]
mod tests {
    use fsdp_comm::process::place::LaunchedBy;

    use super::*;

    #[test]
    fn multiple_processes_verify_one_divisible_world_size() {
        let requested_worlds = |sizes: &[usize], place, ranks| {
            let worlds = requested_worlds(sizes, &[], place, ranks)?;
            Ok::<Vec<usize>, CliError>(worlds.into_iter().map(Ranks::count).collect())
        };
        assert_eq!(requested_worlds(&[], None, 8).unwrap(), [1, 2, 4]);
        assert_eq!(requested_worlds(&[3, 1], None, 8).unwrap(), [3, 1]);
        let launched_by = LaunchedBy::Torchrun;
        let place =
            ProcessPlace { launched_by, process: 1, processes: 4, local_process: 1, local_processes: 4 };
        assert_eq!(requested_worlds(&[], Some(place), 8).unwrap(), [8]);
        assert_eq!(requested_worlds(&[12], Some(place), 8).unwrap(), [12]);
        for refused in [&[2][..], &[4, 8]] {
            assert_eq!(requested_worlds(refused, Some(place), 8).unwrap_err().exit(), Exit::Input);
        }
    }
}
