//! The cost of a whole run: days, device hours, money, and the overhead of failures.

use std::time::Duration;

use fsdp_train::checkpoint::DiskNeed;

use super::ahead::RunForecast;
use crate::error::CliError;

/// Seconds lost when a run fails and resumes: detection, start, loading and compilation. Assumed.
const RESTART_SECONDS: f64 = 600.0;

const YEAR_SECONDS: f64 = 365.25 * 24.0 * 3600.0;

/// The cost of a whole run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    pub(super) tokens: f64,
    pub(super) steps: f64,
    /// Seconds without failures.
    pub(super) seconds: f64,
    /// Mean seconds between failures of any device; infinite if devices never fail.
    pub(super) between_failures: f64,
    /// The duration of a save.
    pub(super) save: Save,
    /// Seconds between saves: as in the run file, or the interval with the least loss.
    pub(super) save_every: f64,
    /// Whether the run file sets the interval.
    pub(super) is_every_given: bool,
    /// Seconds including failures, saves, restarts and repeated steps; infinite if failures are too frequent for
    /// progress.
    pub(super) total_seconds: f64,
    /// US dollars per device and hour.
    pub(super) price: f64,
    pub(super) devices: f64,
}

impl Cost {
    /// The cost of a run of `tokens` tokens, or of all its steps.
    ///
    /// # Errors
    /// [`CliError`]: checkpoints do not support the state.
    pub(super) fn of(
        run: &RunForecast<'_>,
        tokens: Option<f64>,
        price: Option<f64>,
    ) -> Result<Self, CliError> {
        let per_step = run.tokens();
        let steps = tokens.map_or(run.config.train.steps as f64, |tokens| (tokens / per_step).ceil());
        let devices = run.devices();
        let operation = &run.cluster.operation;
        let between_failures = YEAR_SECONDS / (operation.failures_per_device_year.value * devices);
        let save = Save::of(run)?;
        let given = run.config.checkpoint.every as f64 * run.forecast.seconds;
        let is_every_given = given > 0.0;
        let save_every =
            if is_every_given { given } else { save_every(save.stop, between_failures).max(save.write) };
        let seconds = steps * run.forecast.seconds;
        Ok(Self {
            tokens: steps * per_step,
            steps,
            seconds,
            between_failures,
            save,
            save_every,
            is_every_given,
            total_seconds: total_seconds(seconds, save, save_every, between_failures),
            price: price.unwrap_or(operation.price_per_device_hour.value),
            devices,
        })
    }

    /// The fraction of time spent on saves, restarts and repeated steps.
    pub(super) fn lost(&self) -> f64 {
        1.0 - self.seconds / self.total_seconds
    }

    /// Hours over all devices.
    pub(super) fn device_hours(&self) -> f64 {
        self.total_seconds / 3600.0 * self.devices
    }

    /// Cost in US dollars.
    pub(super) fn dollars(&self) -> f64 {
        self.device_hours() * self.price
    }
}

/// Durations of a save, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Save {
    /// Time that blocks steps: the copy of a device's state to the host, and the writing that is not asynchronous.
    pub(super) stop: f64,
    /// Time until everything is written, whether or not steps run meanwhile.
    pub(super) write: f64,
}

impl Save {
    fn of(run: &RunForecast<'_>) -> Result<Self, CliError> {
        // Replicas have the same state, which one of them writes.
        let shards = run.plan.mesh.shards();
        let state = DiskNeed::of(&run.config, &run.plan)?.save_bytes as f64 / shards as f64;
        let on_node = shards.min(run.cluster.devices_per_node()) as f64;
        let copy = state / run.cluster.node.host_link.value;
        let write = state * on_node / run.cluster.storage.write.value;
        let is_async = run.config.checkpoint.is_async;
        Ok(Self { stop: if is_async { copy } else { copy + write }, write: copy + write })
    }
}

/// The interval between saves with the least loss (Young, 1974; Daly, 2006, to first order): the square root of twice
/// the time of a save times the time between failures.
fn save_every(save: f64, between_failures: f64) -> f64 {
    if between_failures.is_finite() {
        (2.0 * save * between_failures).sqrt().max(save)
    } else {
        f64::INFINITY
    }
}

/// Total seconds, of which `seconds` are steps. Each save blocks steps, and one that starts while the last is still
/// being written waits for it. Each failure adds a restart and repeated work: everything since the last save that was
/// written, on average half of the interval and the time of writing.
fn total_seconds(seconds: f64, save: Save, every: f64, between_failures: f64) -> f64 {
    let stop = if every.is_finite() { save.stop.max(save.write - every) / every } else { 0.0 };
    let without_failures = seconds * (1.0 + stop);
    if !between_failures.is_finite() {
        return without_failures;
    }
    let repeated = every * (1.0 + stop) / 2.0 + save.write - save.stop;
    let part = (RESTART_SECONDS + repeated) / between_failures;
    if part < 1.0 { without_failures / (1.0 - part) } else { f64::INFINITY }
}

/// Formats a time in the largest suitable unit: `3.2 days`, `4.1 hours`, `12 min`, `35 s`, `120 ms`.
pub(super) fn span(seconds: f64) -> String {
    match seconds {
        _ if !seconds.is_finite() => "never".to_owned(),
        _ if seconds >= 2.0 * 86_400.0 => format!("{:.1} days", seconds / 86_400.0),
        _ if seconds >= 2.0 * 3600.0 => format!("{:.1} hours", seconds / 3600.0),
        _ if seconds >= 120.0 => format!("{:.0} min", seconds / 60.0),
        _ if seconds >= 10.0 => format!("{seconds:.0} s"),
        _ if seconds >= 1.0 => format!("{seconds:.2} s"),
        _ if seconds >= 1e-3 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{:.0} us", Duration::from_secs_f64(seconds.max(0.0)).as_secs_f64() * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn young_save_interval_minimizes_run_time() {
        for (save, between) in [(1.0, 1e4), (30.0, 86_400.0), (5.0, 1e6)] {
            let best = save_every(save, between);
            let save = Save { stop: save, write: 3.0 * save };
            for other in [0.5, 0.8, 1.25, 2.0] {
                assert!(
                    total_seconds(1.0, save, best, between) < total_seconds(1.0, save, best * other, between)
                );
            }
        }
    }

    #[test]
    fn run_time_includes_saves_and_failures() {
        let save = Save { stop: 1.0, write: 5.0 };
        assert_eq!(total_seconds(100.0, save, save_every(1.0, f64::INFINITY), f64::INFINITY), 100.0);
        // Devices that never fail lose only the time of saves; asynchronous writes are lost with a failure.
        assert_eq!(total_seconds(100.0, save, 100.0, f64::INFINITY), 101.0);
        let failing = 101.0 / (1.0 - (600.0 + 50.5 + 4.0) / 1e4);
        assert!((total_seconds(100.0, save, 100.0, 1e4) - failing).abs() < 1e-9);
        // A save after every second waits four more until the last one is written.
        assert_eq!(total_seconds(100.0, save, 1.0, f64::INFINITY), 500.0);
        // A run that fails more often than it can restart never ends.
        assert_eq!(total_seconds(100.0, save, 100.0, 500.0), f64::INFINITY);
    }

    #[test]
    fn span_picks_fitting_unit() {
        let spans = [2e-6, 0.0123, 1.234, 65.0, 600.0, 8000.0, 3e5, f64::INFINITY].map(span);
        assert_eq!(spans, ["2 us", "12.3 ms", "1.23 s", "65 s", "10 min", "2.2 hours", "3.5 days", "never"]);
    }
}
