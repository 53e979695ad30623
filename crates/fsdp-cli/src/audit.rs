//! `fsdp audit`.

mod init;
mod report;
mod variants;

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fsdp_ckpt::training::ModelWeights;
use fsdp_comm::process::cluster::Cluster;
use fsdp_config::{Init, Resolved, RunConfig};
use fsdp_data::RunData;
use fsdp_nn::model::Architecture;
use fsdp_train::audit::{Audit, AuditMemory, MicroBatch, Report, Setting, by_step, read_batches, steps_done};
use fsdp_train::{InitSource, Job};
use indicatif::ProgressBar;

use self::variants::Stated;
use crate::allocator::keep_no_large_blocks;
use crate::args::AuditArgs;
use crate::atomic_file::folder_of;
use crate::device::Purpose;
use crate::device::host::{self, threads_per_rank, total_threads};
use crate::document::page::{Page, expect_replaceable};
use crate::document::{Report as _, print};
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::run_setup::{Model, RunSetup};
use crate::stop_signal::StopSignal;
use crate::units::bytes;
use crate::{cluster, logging, output};

/// Judges a step and prints the verdict.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the report cannot be written.
pub(crate) fn run(args: &AuditArgs) -> Result<Exit, CliError> {
    // There is nothing to save: every signal ends the process at once.
    let signal = StopSignal::install_idle()?;
    logging::install(None)?;
    let place = cluster::place()?;
    if let Some(folder) = &args.init {
        if cluster::is_not_first(place) {
            return Ok(Exit::Done);
        }
        return init::run(folder, args.file.as_deref());
    }
    if let Some(report) = &args.report {
        expect_replaceable("--report", report)?;
        expect_folder(report)?;
    }
    keep_no_large_blocks();
    let setup = setup(args)?;
    let ranks = args.ranks.or(place.map(|place| place.processes)).unwrap_or(1);
    let run = RunConfig { ranks, ..setup.config.run.clone() };
    cluster::within(place, &run, args.network, |team| {
        let cluster = team.map(|team| team.cluster);
        let judged = cluster::in_turns(team, || judged(args, setup), |(job, ..)| job.data.share())?;
        let run = RunConfig { ranks: useful_ranks(run.ranks, &judged, cluster), ..run.clone() };
        let report = judge(args, &judged, &run, (cluster, &signal))?;
        if cluster.is_none_or(Cluster::is_leader) {
            write(args, &report)?;
        }
        Ok(if report.is_sound() { Exit::Done } else { Exit::Found })
    })
}

fn judge(
    args: &AuditArgs,
    (job, steps, stated): &Judged,
    run: &RunConfig,
    (cluster, signal): (Option<&Cluster>, &StopSignal),
) -> Result<Report, CliError> {
    let longest = steps.iter().flatten().map(|batch| batch.seq).max().unwrap_or(0);
    let settings: Vec<Setting<Model>> = variants::settings(stated, longest);
    let stages = Stages::new();
    let ranks_on_machine = cluster.map_or(run.ranks, Cluster::ranks_on_machine);
    let audit = Audit {
        job,
        before: args.before(),
        after: args.after(),
        at_step: args.at_step,
        steps,
        settings: &settings,
        threads: threads_per_rank(total_threads(run.threads), ranks_on_machine),
        stop: &signal.stop,
        progress: &|what| stages.show(what),
    };
    say_need(&audit.memory(run.ranks)?, ranks_on_machine);
    Ok(match cluster {
        Some(cluster) => audit.judge(&host::processes(run, Purpose::Training, cluster), run.ranks)?,
        None => audit.judge(&host::ranks(run, Purpose::Training), run.ranks)?,
    })
}

/// The ranks of this process that have a micro-batch to compute. Several processes hold the ranks that they were started with.
fn useful_ranks(ranks: usize, (_, steps, _): &Judged, cluster: Option<&Cluster>) -> usize {
    let useful = steps.iter().map(Vec::len).max().unwrap_or(1).max(1);
    if cluster.is_some() || ranks <= useful {
        return ranks;
    }
    output::warning(&format!(
        "--ranks {ranks}: a step has {useful} micro-batches, which are dealt to the ranks, so {useful} of them compute"
    ));
    useful
}

/// Refuses a file whose folder does not exist, before the work that it is meant to show.
fn expect_folder(file: &Path) -> Result<(), CliError> {
    match folder_of(file).metadata() {
        Ok(found) if found.is_dir() => Ok(()),
        found => {
            let source = found.err().unwrap_or_else(|| io::ErrorKind::NotADirectory.into());
            Err(CliError::create("--report", file)(source))
        }
    }
}

/// Prints the verdict, and what its findings may come from, and writes the page if one is wanted. The verdict is printed even if the page cannot be written.
fn write(args: &AuditArgs, report: &Report) -> Result<(), CliError> {
    print(report, args.json)?;
    if let Some(page) = args.report.as_ref().filter(|_| !args.json) {
        output::print(&format!("\n{}\n", page.display()))?;
    }
    if !report.is_sound() {
        init::say_open(&args.run().file);
    }
    match &args.report {
        Some(file) => {
            let mut page = Page::default();
            report.write(&mut page);
            page.write("Audit of a training step", file)
        }
        None => Ok(()),
    }
}

/// The job, the micro-batches of each step, and what is stated of its model.
type Judged = (Job<Model>, Vec<Vec<MicroBatch>>, Stated);

/// Reads a whole run file, if its data is needed, or what it says of the model and its update.
fn setup(args: &AuditArgs) -> Result<RunSetup, CliError> {
    let run = args.run();
    if args.data {
        return RunSetup::load(&run);
    }
    let (setup, warnings) = RunSetup::of(Resolved::load_for_audit(&run.file, &run.overrides)?)?;
    warnings.iter().for_each(|warning| output::warning(warning));
    Ok(setup)
}

/// Reads the batch, from a file or from the run file's data.
fn judged(args: &AuditArgs, setup: RunSetup) -> Result<Judged, CliError> {
    let (setup, architecture, init) = prepared(args.before(), setup)?;
    let stated = Stated::of(&setup);
    if let Some(batch) = &args.batch {
        let limits = (architecture.head().vocab, architecture.positions_max());
        let batches = read_batches(batch, args.shifted, limits)?;
        let steps = by_step(batch, batches, args.steps)?;
        let data = Arc::new(RunData::none());
        return Ok((Job::with_data(setup.config, architecture, init, data)?, steps, stated));
    }
    let job = Job::new(setup.config, architecture, init)?;
    let step = steps_done(&job, [args.before(), args.after()], args.at_step, args.steps)?;
    let of_step = |step| {
        let batches = (0..job.data.micro_batches()).map(|index| job.data.train_batch(step, index));
        batches.map(|batch| MicroBatch::of_batch(&batch)).collect()
    };
    let steps = (0..args.steps as u64).map(|later| of_step(step + later)).collect();
    Ok((job, steps, stated))
}

/// Builds the model without dropout. Weights come from the checkpoint, except for the base of adapters where the checkpoint
/// lacks it.
fn prepared(before: &Path, setup: RunSetup) -> Result<(RunSetup, Model, InitSource), CliError> {
    let mut setup = variants::without_dropout(setup)?;
    setup.config.model.init =
        match setup.config.adapter.is_some() && ModelWeights::are_in(&setup.config.model.path) {
            true => Init::Pretrained,
            false => Init::Random,
        };
    let architecture = setup.build()?;
    let init = setup.init(&architecture, Some(before))?;
    Ok((setup, architecture, init))
}

/// Says what the ranks on this machine need, in the log if it is little.
fn say_need(need: &AuditMemory, ranks: usize) {
    let all = need.total().saturating_mul(ranks as u64);
    let ranks = if ranks > 1 { format!(" for {ranks} ranks, each") } else { ":".to_owned() };
    let text = format!(
        "this takes about {} of memory{ranks} {} for the largest layer and its gradient, {} for activations, {} for comparing{}",
        bytes(all),
        bytes(need.layer),
        bytes(need.activations),
        bytes(need.samples),
        match need.states {
            0 => String::new(),
            states => format!(", {} for weights, moments and gradients of the steps", bytes(states)),
        }
    );
    match all {
        ..SAID_MIN => tracing::info!("{text}"),
        SAID_MIN.. => output::note(&text),
    }
}

/// Needs below this are not worth a line.
const SAID_MIN: u64 = 1 << 30;

/// Interval between two lines of a log.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows on stderr what is being computed: in place on a terminal, and in a log as a line every few seconds.
struct Stages {
    spinner: Option<ProgressBar>,
    last: Mutex<Instant>,
}

impl Stages {
    fn new() -> Self {
        let spinner = output::draws_bars().then(ProgressBar::new_spinner);
        spinner.iter().for_each(|spinner| spinner.enable_steady_tick(Duration::from_millis(100)));
        Self { spinner, last: Mutex::new(Instant::now()) }
    }

    fn show(&self, what: &str) {
        if let Some(spinner) = &self.spinner {
            return spinner.set_message(what.to_owned());
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= LINE_INTERVAL {
            *last = Instant::now();
            output::note(what);
        }
    }
}

impl Drop for Stages {
    fn drop(&mut self) {
        self.spinner.iter().for_each(ProgressBar::finish_and_clear);
    }
}
