//! Progress of a run: a bar on a terminal, plain lines elsewhere.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fsdp_train::Evaluation;
use fsdp_train::checkpoint::{Change, ImportSummary, Saved};
use fsdp_train::metrics::{Scaling, StepMetrics};
use fsdp_train::train::{Reporter, Resumed, RunWarning};
use indicatif::{ProgressBar, ProgressStyle};

use crate::units::{self, clock, perplexity, rate};
use crate::{launch, output};

/// Number of plain lines per run, if steps are short.
const LINES: u64 = 20;
/// Maximum time between plain lines, if steps are long.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
const BAR: &str = "{bar:28} {pos}/{len} {msg} ETA {eta}";

/// Reports the progress of a run on stderr.
#[derive(Debug)]
pub(crate) struct Progress {
    steps: u64,
    /// The unit of the speed.
    speed_unit: &'static str,
    /// Number of steps done before the run resumed.
    first: AtomicU64,
    start: Instant,
    display: Display,
    stop: Arc<AtomicBool>,
    has_announced_stop: AtomicBool,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines { last: Mutex<Instant> },
}

impl Progress {
    /// Starts reporting a run of `steps` steps that ends early when `stop` is set.
    pub(crate) fn new(steps: u64, speed_unit: &'static str, stop: Arc<AtomicBool>) -> Self {
        let start = Instant::now();
        let display = if output::draws_bars() {
            let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
            Display::Bar(ProgressBar::new(steps).with_style(style))
        } else {
            Display::Lines { last: Mutex::new(start) }
        };
        Self {
            steps,
            speed_unit,
            first: AtomicU64::new(0),
            start,
            display,
            stop,
            has_announced_stop: AtomicBool::new(false),
        }
    }

    /// Leaves the bar at its current position.
    pub(crate) fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.abandon();
        }
    }

    fn print_line(&self, line: &str) {
        match &self.display {
            Display::Bar(bar) => bar.println(output::shown(line)),
            Display::Lines { .. } => output::note(line),
        }
    }

    /// Prints a line that the trainer also logs; with JSON lines the log entry replaces it.
    fn print_unless_json(&self, line: &str) {
        if !output::is_json() {
            self.print_line(line);
        }
    }

    fn line(&self, last: &Mutex<Instant>, metrics: &StepMetrics) {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        let step = metrics.step;
        let is_due = step.is_multiple_of((self.steps / LINES).max(1)) || last.elapsed() >= LINE_INTERVAL;
        let is_skipped = metrics.scaling.is_some_and(|scaling| scaling.skipped);
        if !(is_due || is_skipped || step == self.first.load(Ordering::Relaxed) + 1 || step == self.steps) {
            return;
        }
        *last = Instant::now();
        let first = self.first.load(Ordering::Relaxed);
        let left = remaining(self.start.elapsed(), step - first, self.steps - first);
        if output::is_json() {
            let StepMetrics { loss, grad_norm, lr, tokens_per_s, .. } = *metrics;
            let (steps, seconds_left) = (self.steps, left.as_secs());
            tracing::info!(step, steps, loss, grad_norm, lr, tokens_per_s, seconds_left, "training");
            return;
        }
        let width = self.steps.to_string().len();
        let description = self.describe(metrics);
        output::note(&format!("step {step:>width$}/{} {description} ETA {}", self.steps, clock(left)));
    }

    /// The line about a step.
    fn describe(&self, metrics: &StepMetrics) -> String {
        let skipped = match &metrics.scaling {
            Some(Scaling { loss_scale, skipped: true }) => {
                format!(" skipped (gradients overflow at loss scale {loss_scale})")
            }
            _ => String::new(),
        };
        let Self { speed_unit, .. } = self;
        format!("loss {:.4} {} {speed_unit}{skipped}", metrics.loss, rate(metrics.tokens_per_s))
    }
}

impl Reporter for Progress {
    fn step(&self, metrics: &StepMetrics) {
        match &self.display {
            Display::Bar(bar) => {
                bar.set_message(self.describe(metrics));
                bar.set_position(metrics.step);
            }
            Display::Lines { last } => self.line(last, metrics),
        }
        if self.stop.load(Ordering::Relaxed) && !self.has_announced_stop.swap(true, Ordering::Relaxed) {
            self.print_line(
                "stopping after the current step; interrupt again to exit at once, with nothing saved",
            );
        }
    }

    fn taken_over(&self) {
        launch::Note::TakenOver.leave();
    }

    fn evaluation(&self, step: u64, evaluation: &Evaluation) {
        let Evaluation { set, loss, targets } = evaluation;
        let perplexity = perplexity(evaluation.perplexity());
        self.print_unless_json(&format!(
            "evaluation after step {step} on {set}: loss {loss:.4}, perplexity {perplexity}, {targets} tokens"
        ));
    }

    fn resumed(&self, resumed: Option<&Resumed>) {
        beginning(resumed).iter().for_each(|line| self.print_line(line));
        if let (Some(resumed), Display::Bar(bar)) = (resumed, &self.display) {
            bar.set_position(resumed.step);
            bar.reset_eta();
        }
        self.first.store(resumed.map_or(0, |resumed| resumed.step), Ordering::Relaxed);
    }

    fn warn(&self, warning: &RunWarning) {
        let warn = || output::warning(&warning.to_string());
        match &self.display {
            Display::Bar(bar) => bar.suspend(warn),
            Display::Lines { .. } => warn(),
        }
    }

    fn saved(&self, saved: &Saved) {
        let Saved { step, path, bytes, elapsed } = saved;
        let (size, seconds) = (units::bytes(*bytes), elapsed.as_secs_f64());
        self.print_unless_json(&format!(
            "checkpoint after step {step}: {size} in {seconds:.2} s, {}",
            path.display()
        ));
    }
}

/// Lines about where a run begins.
fn beginning(resumed: Option<&Resumed>) -> Vec<String> {
    let Some(resumed) = resumed else { return vec!["no checkpoint in run.out_dir yet: starting".to_owned()] };
    let mut lines = vec![format!("resuming from {} after step {}", resumed.path.display(), resumed.step)];
    for Change { key, from, to, .. } in &resumed.changes {
        let [from, to] = [from, to].map(|value| if value.is_empty() { "unset" } else { value });
        lines.push(format!("{key} was {from}, now {to}: from here on, bits differ from an unchanged run's"));
    }
    lines.extend(resumed.taken.iter().flat_map(rows));
    lines
}

/// A table of the contents imported from another trainer's checkpoint.
fn rows(taken: &ImportSummary) -> Vec<String> {
    let ImportSummary { format, taken, derived, missing, unused, notes } = taken;
    let unused = match unused.len() {
        0 => "-".to_owned(),
        count => format!("{count}: {}", listed(unused)),
    };
    let row = |key: &str, items: &[String]| {
        let shown = if items.is_empty() { "-".to_owned() } else { items.join("; ") };
        format!("  {key:<9} {shown}")
    };
    let mut rows = vec![format!("  {:<9} {format}", "format")];
    rows.extend([row("taken", taken), row("derived", derived), row("missing", missing)]);
    rows.push(format!("  {:<9} {unused}", "not used"));
    rows.extend(notes.iter().map(|note| format!("  {:<9} {}", "note", output::one_line(note))));
    rows
}

/// The first few names.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let more = if names.len() > SHOWN { ", .." } else { "" };
    names[..names.len().min(SHOWN)].join(", ") + more
}

/// Estimated time for the remaining steps, at the average speed of the first `done` of `all`.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn remaining(elapsed: Duration, done: u64, all: u64) -> Duration {
    elapsed.mul_f64(all.saturating_sub(done) as f64 / done.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_time_is_proportional() {
        let elapsed = Duration::from_secs(10);
        assert_eq!(remaining(elapsed, 5, 20), Duration::from_secs(30));
        assert_eq!(remaining(elapsed, 20, 20), Duration::ZERO);
    }

    #[test]
    fn bar_template_is_valid() {
        assert!(ProgressStyle::with_template(BAR).is_ok());
    }
}
