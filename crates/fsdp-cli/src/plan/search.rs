//! `fsdp plan --search`: tries all combinations of settings and shows those that no other one beats.

use std::io;
use std::path::Path;

use fsdp_config::Resolved;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};

use super::ahead::{Forecaster, RunForecast};
use super::cost::{Cost, span};
use super::json::{run_json, sources_json};
use super::report::{WIDTH, assumptions, run_rows};
use super::settings::{Settings, contexts, expert_axes};
use crate::args::PlanArgs;
use crate::atomic_file;
use crate::document::{Document, Mark, Report, rendered};
use crate::error::CliError;
use crate::units::{bytes, rate};

/// Maximum rows of the front that are shown.
const SHOWN: usize = 12;

/// Number of the fastest settings that are also tried with other units, besides the front.
const REFINED: usize = 32;

/// The prediction for one combination of settings.
struct Candidate {
    settings: Settings,
    seconds: f64,
    /// Minimum and maximum seconds.
    band: [f64; 2],
    tokens_per_second: f64,
    device_bytes: u64,
    exposed: f64,
    computing: f64,
    fits: bool,
}

/// A setting that is worse than the fastest.
#[derive(Serialize)]
struct Loser {
    /// The changed setting.
    change: String,
    /// By how many percent a step is slower; negative if it is faster but does not fit.
    #[serde(rename = "slower_percent")]
    slower: f64,
    fits: bool,
    why: String,
}

/// The fastest settings that fit: the cost of the whole run, and its step.
type Best<'a> = (Cost, RunForecast<'a>);

/// All predictions.
struct Found {
    /// All supported combinations, the fastest first.
    candidates: Vec<Candidate>,
    /// Number of unsupported combinations: a mesh or group size that does not divide evenly.
    impossible: usize,
}

/// Tries all settings; returns the front of time and memory as text.
///
/// # Errors
/// [`CliError`]: a file cannot be written, or nothing fits and a run file was requested.
pub(super) fn render(forecaster: &Forecaster<'_>, args: &PlanArgs) -> Result<String, CliError> {
    if let Some(file) = args.write.as_ref().filter(|file| file.exists()) {
        // Report this before a long search, not after it.
        return Err(CliError::create("--write", file)(io::ErrorKind::AlreadyExists.into()));
    }
    let found = explore(forecaster);
    let front = found.front();
    if let Some(file) = &args.write {
        write(forecaster.config, front.first().copied(), file)?;
    }
    // The cost of the whole run with the fastest settings, and its assumptions.
    let cost = |best: &&Candidate| -> Result<Best<'_>, CliError> {
        let run = forecaster.forecast(&best.settings.applied(forecaster.config))?;
        Ok((Cost::of(&run, args.tokens, args.price)?, run))
    };
    let search = Search {
        best: front.first().map(cost).transpose()?,
        found: &found,
        front: &front,
        current: Settings::of(forecaster.config),
        capacity: forecaster.cluster.device.memory.value as u64,
    };
    Ok(rendered(&search, args.json))
}

fn explore(forecaster: &Forecaster<'_>) -> Found {
    let candidate = |settings: &Settings| {
        let config = settings.applied(forecaster.config);
        // With a smaller context axis, there are more ranks with micro-batches of their own.
        if !config.train.micro_batches_per_step().is_multiple_of(config.run.ranks / settings.context) {
            return None;
        }
        let run = forecaster.forecast(&config).ok()?;
        Some(Candidate {
            settings: settings.clone(),
            seconds: run.forecast.seconds,
            band: run.band,
            tokens_per_second: run.tokens_per_second(),
            device_bytes: run.device_bytes(),
            exposed: run.forecast.exposed,
            computing: run.forecast.computing,
            fits: run.fits(),
        })
    };
    let all = Settings::all(forecaster.config, forecaster.cluster);
    let mut found = Found { candidates: all.par_iter().filter_map(candidate).collect(), impossible: 0 };
    found.sort();
    // Other units are tried only for the front and for settings that are nearly as fast: units change little compared
    // with the other settings.
    let fitting = found.candidates.iter().filter(|candidate| candidate.fits).take(REFINED);
    let units = found
        .front()
        .into_iter()
        .chain(fitting.clone())
        .flat_map(|candidate| candidate.settings.wrapped(&forecaster.wraps))
        .filter(|settings| settings.wrap != forecaster.config.fsdp.wrap);
    // A context axis costs time and saves memory, so it is for faster settings that do not fit.
    let contexts = contexts(forecaster.config, forecaster.cluster);
    let shared = found
        .lacking_memory()
        .into_iter()
        .flat_map(|candidate| candidate.settings.sharing_samples(&contexts))
        .filter(|settings| settings.context != forecaster.config.fsdp.mesh.context);
    // An expert axis saves traffic and unsharded memory, and costs traffic and memory of activations.
    let sizes = expert_axes(forecaster.config, forecaster.cluster, forecaster.experts());
    let divided = found
        .front()
        .into_iter()
        .chain(fitting)
        .chain(found.lacking_memory())
        .flat_map(|candidate| candidate.settings.sharing_experts(&sizes))
        .filter(|settings| settings.expert != forecaster.config.fsdp.mesh.expert);
    let mut others: Vec<Settings> = units.chain(shared).chain(divided).collect();
    let mut seen = Vec::new();
    others.retain(|settings| {
        !seen.contains(settings) && {
            seen.push(settings.clone());
            true
        }
    });
    found.candidates.extend(others.par_iter().filter_map(candidate).collect::<Vec<_>>());
    found.impossible = all.len() + others.len() - found.candidates.len();
    found.sort();
    found
}

impl Candidate {
    /// The main reason why a step is slower than with the fastest settings.
    fn why_slower(&self, best: &Self) -> String {
        let (exposed, computing) = (self.exposed - best.exposed, self.computing - best.computing);
        if exposed >= computing {
            return format!("computation waits {} longer", span(exposed));
        }
        let (slower, fastest) = (&self.settings, &best.settings);
        let because = match () {
            () if (slower.context, slower.expert) != (fastest.context, fastest.expert) => {
                "activations or rows of experts move between ranks"
            }
            () if slower.checkpointing != fastest.checkpointing => "more is recomputed",
            () if slower.micro_batch != fastest.micro_batch => "smaller operations, more often",
            () => "more of it runs during transfers, or handles gathered data",
        };
        format!("computing takes {} longer: {because}", span(computing))
    }
}

/// At most `limit` evenly spaced items of a list, including both ends.
fn spread<T: Copy>(all: &[T], limit: usize) -> Vec<T> {
    if all.len() <= limit {
        return all.to_vec();
    }
    (0..limit).map(|place| all[place * (all.len() - 1) / (limit - 1)]).collect()
}

impl Found {
    /// Sorts by time, then by memory; among equal settings, those of the run file come first.
    fn sort(&mut self) {
        self.candidates.sort_by(|one, other| {
            one.seconds.total_cmp(&other.seconds).then(one.device_bytes.cmp(&other.device_bytes))
        });
    }

    /// Settings that would be faster than all that fit; those that need the least memory first.
    fn lacking_memory(&self) -> Vec<&Candidate> {
        let fitting = self.candidates.iter().position(|candidate| candidate.fits);
        let mut faster: Vec<&Candidate> =
            self.candidates[..fitting.unwrap_or(self.candidates.len())].iter().collect();
        faster.sort_by_key(|candidate| candidate.device_bytes);
        faster.truncate(REFINED);
        faster
    }

    /// Number of settings that fit.
    fn fitting(&self) -> usize {
        self.candidates.iter().filter(|candidate| candidate.fits).count()
    }

    /// The settings that fit and that no other ones beat in both time and memory, the fastest first.
    fn front(&self) -> Vec<&Candidate> {
        let mut min_bytes = u64::MAX;
        let mut front = Vec::new();
        for candidate in self.candidates.iter().filter(|candidate| candidate.fits) {
            if candidate.device_bytes < min_bytes {
                min_bytes = candidate.device_bytes;
                front.push(candidate);
            }
        }
        front
    }

    /// The fastest settings with one of them changed: how much slower they are, or that they do not fit, and why.
    fn losers(&self) -> Vec<Loser> {
        let Some(best) = self.candidates.iter().find(|candidate| candidate.fits) else { return Vec::new() };
        let mut losers = Vec::new();
        for candidate in &self.candidates {
            let changes = candidate.settings.differences(&best.settings);
            let [change] = &changes[..] else { continue };
            let why = if candidate.fits {
                candidate.why_slower(best)
            } else {
                format!("does not fit: {}", bytes(candidate.device_bytes))
            };
            let slower = 100.0 * (candidate.seconds / best.seconds - 1.0);
            if slower >= 0.05 || !candidate.fits {
                losers.push(Loser { change: change.clone(), slower, fits: candidate.fits, why });
            }
        }
        losers
    }
}

/// The result of a search.
struct Search<'a> {
    found: &'a Found,
    front: &'a [&'a Candidate],
    /// The settings of the run file.
    current: Settings,
    /// Memory of a device in bytes.
    capacity: u64,
    best: Option<Best<'a>>,
}

impl Report for Search<'_> {
    fn json(&self) -> Value {
        let Self { found, front, best, .. } = self;
        let candidate = |candidate: &&Candidate| {
            json!({
                "change": candidate.settings.differences(&self.current),
                "step_seconds": candidate.seconds,
                "band_seconds": candidate.band,
                "tokens_per_second": candidate.tokens_per_second,
                "device_bytes": candidate.device_bytes,
                "exposed_seconds": candidate.exposed,
            })
        };
        json!({
            "tried": found.candidates.len() + found.impossible,
            "impossible": found.impossible,
            "fitting": found.fitting(),
            "front": front.iter().map(candidate).collect::<Vec<_>>(),
            "losers": found.losers(),
            "run": best.as_ref().map(|(cost, _)| run_json(cost)),
            "assumed": best.as_ref().map(|(_, run)| assumptions(run)),
            "sources": best.as_ref().map(|(_, run)| sources_json(run)),
        })
    }

    fn write(&self, to: &mut dyn Document) {
        let Self { found: Found { candidates, impossible }, front, .. } = self;
        let (all, fitting) = (candidates.len(), self.found.fitting());
        to.line(&format!(
            "{} settings tried: {fitting} fit, {} need more than {} of a device, {impossible} are impossible on this mesh",
            all + impossible,
            all - fitting,
            bytes(self.capacity)
        ));
        to.gap();
        if front.is_empty() {
            return self.write_least(to);
        }
        let rows = spread(front, SHOWN).into_iter().map(|candidate| self.row(candidate));
        to.table(["step", "may be", "tokens/s", "memory", "exposed", "what to set"], rows);
        if let Some(more @ 1..) = front.len().checked_sub(SHOWN) {
            to.line(&format!("and {more} between them (--json lists all)"));
        }
        to.gap();
        let losers = self.found.losers().into_iter().take(SHOWN);
        let losers = losers.map(|Loser { change, slower, why, .. }| [change, format!("{slower:+.1} %"), why]);
        to.table(["beside the fastest", "step", "why not"], losers);
        if let Some((cost, run)) = &self.best {
            to.section("the whole run with the fastest");
            to.pairs(WIDTH, &run_rows(cost));
            to.section("assumed");
            to.list(assumptions(run));
        }
    }
}

impl Search<'_> {
    fn row(&self, candidate: &Candidate) -> [String; 6] {
        let changes = candidate.settings.differences(&self.current);
        [
            span(candidate.seconds),
            format!("{} to {}", span(candidate.band[0]), span(candidate.band[1])),
            rate(candidate.tokens_per_second),
            bytes(candidate.device_bytes),
            format!("{:.1} %", 100.0 * candidate.exposed / candidate.seconds),
            if changes.is_empty() { "as the run file says".to_owned() } else { changes.join(", ") },
        ]
    }

    /// Writes how much memory the smallest settings need.
    fn write_least(&self, to: &mut dyn Document) {
        let least = self.found.candidates.iter().min_by_key(|candidate| candidate.device_bytes);
        to.each(
            Mark::Plain,
            "nothing fits; the least is",
            least.map(|least| {
                let (bytes, changes) = (bytes(least.device_bytes), least.settings.differences(&self.current));
                format!("{bytes} with {}: use more devices, or larger ones", changes.join(", "))
            }),
        );
    }
}

/// Writes the run file, including all defaults, with the fastest settings.
fn write(config: &Resolved, best: Option<&Candidate>, file: &Path) -> Result<(), CliError> {
    let refused = |what: String| CliError::Option { option: "--write", what };
    let best = best.ok_or_else(|| refused("nothing fits, so there is no run file to write".to_owned()))?;
    let head = format!(
        "# The fastest settings that fit, as `fsdp plan --search` found them: {} a step.\n\n",
        span(best.seconds)
    );
    let text = head + &best.settings.applied(config).to_toml();
    atomic_file::create(file, &text).map_err(CliError::create("--write", file))
}
