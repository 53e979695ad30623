//! Progress in bytes: a bar on a terminal, plain lines elsewhere, and nothing for short work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fsdp_ckpt::transfer::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;
use crate::units::{bytes, clock};

/// Shorter work shows no bar.
const BAR_DELAY: Duration = Duration::from_millis(500);
/// Interval between plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
const BAR: &str = "{msg}{bar:28} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, ETA {eta}";

/// Shows the progress of long work on stderr. The bar is removed on drop.
#[derive(Debug)]
pub(crate) struct ByteProgress {
    label: &'static str,
    done: AtomicU64,
    total: AtomicU64,
    start: Instant,
    display: Display,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines { last: Mutex<Instant> },
}

impl ByteProgress {
    /// Starts showing progress; `label` is the label in front.
    pub(crate) fn new(label: &'static str) -> Self {
        let start = Instant::now();
        let display = if output::draws_bars() {
            let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden()).with_style(style);
            bar.set_message(label);
            Display::Bar(bar)
        } else {
            Display::Lines { last: Mutex::new(start) }
        };
        Self { label, done: AtomicU64::new(0), total: AtomicU64::new(0), start, display }
    }
}

impl Progress for ByteProgress {
    fn begin(&self, total_bytes: u64) {
        // Work may have several stages, whose bytes add up.
        let total = self.total.fetch_add(total_bytes, Ordering::Relaxed) + total_bytes;
        if let Display::Bar(bar) = &self.display {
            bar.set_length(total);
        }
    }

    fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        match &self.display {
            Display::Bar(bar) => {
                bar.inc(bytes);
                if bar.is_hidden() && self.start.elapsed() >= BAR_DELAY {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                }
            }
            Display::Lines { last } => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.elapsed() >= LINE_INTERVAL {
                    *last = Instant::now();
                    let line = progress_line(done, self.total.load(Ordering::Relaxed), self.start.elapsed());
                    output::note(&format!("{}{line}", self.label));
                }
            }
        }
    }
}

impl Drop for ByteProgress {
    fn drop(&mut self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

/// The text of a plain line.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate and an estimate, both positive"
)]
fn progress_line(done: u64, total: u64, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    let left = Duration::from_secs((total.saturating_sub(done) as f64 / rate.max(1.0)) as u64);
    format!("{} of {}, {}/s, ETA {}", bytes(done), bytes(total), bytes(rate as u64), clock(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_line_shows_bytes_rate_and_eta() {
        let line = progress_line(1 << 30, 4 << 30, Duration::from_secs(10));
        assert_eq!(line, "1.0 GiB of 4.0 GiB, 102.4 MiB/s, ETA 0:30");
        assert_eq!(progress_line(0, 10, Duration::ZERO), "0 B of 10 B, 0 B/s, ETA 0:10");
    }

    #[test]
    fn bar_template_is_valid() {
        assert!(ProgressStyle::with_template(BAR).is_ok());
    }

    #[test]
    fn totals_accumulate_across_stages() {
        let progress = ByteProgress::new("");
        for _ in 0..2 {
            progress.begin(10);
            progress.advance(10);
        }
        assert_eq!(progress.total.load(Ordering::Relaxed), 20);
        assert_eq!(progress.done.load(Ordering::Relaxed), 20);
    }
}
