//! What a step reports, and the file it is reported in.
//!
//! `metrics.jsonl` holds one JSON object per step and is flushed after each, so that a run can be watched
//! and an interrupted one keeps what it did. In front of the steps of each start stands a line that says who takes part;
//! it has no `step`. Nothing here reads a clock: the trainer measures.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use fsdp_comm::process::cluster;
use serde::Serialize;
use serde_json::json;

use crate::whole_file;

/// The name of the file, in the output folder.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// The key of the line that stands in front of the steps of a start.
const START: &str = "start";

/// One line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// The step, from 1.
    pub step: u64,
    /// Mean cross-entropy over the counted tokens of the global batch, before the update.
    pub loss: f64,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate that this step used.
    pub lr: f64,
    /// Input tokens of the global batch.
    pub tokens: u64,
    /// Tokens per second, over all ranks.
    pub tokens_per_s: f64,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Model FLOP/s over peak FLOP/s, where the peak is known.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<Utilization>,
    /// How long ranks waited for each other, where that is known of a step that no line has told yet.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
}

/// How long the ranks of a step waited in its collectives: for ranks that came later, and for the data on its way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Waiting {
    /// The step, as [`StepMetrics::step`]: one before the line's, since ranks tell it when a step is over.
    pub wait_step: u64,
    /// The mean over all ranks.
    pub wait_ms: f64,
    /// That of the rank which waited longest.
    pub wait_ms_max: f64,
    /// That of the rank which waited least. What others waited beyond it, they waited for it.
    pub wait_ms_min: f64,
    /// The rank which waited least: the one that all others wait for.
    pub slowest_rank: usize,
}

impl Waiting {
    /// What the ranks of a step say, in their order: how long each one waited.
    ///
    /// # Panics
    /// Without ranks.
    #[expect(clippy::cast_precision_loss, reason = "a number of ranks")]
    pub(crate) fn of(step: u64, waited: &[Duration]) -> Self {
        let ms = |waited: &Duration| waited.as_secs_f64() * 1e3;
        let slowest = waited.iter().enumerate().min_by_key(|(_, waited)| **waited);
        let (slowest_rank, least) = slowest.expect("a world has ranks");
        Self {
            wait_step: step,
            wait_ms: waited.iter().map(ms).sum::<f64>() / waited.len() as f64,
            wait_ms_max: waited.iter().max().map_or(0.0, ms),
            wait_ms_min: ms(least),
            slowest_rank,
        }
    }
}

/// Who takes part in a run, and how they are connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Census {
    /// What carries data between ranks.
    pub transport: String,
    /// The processes, in the order of their ranks.
    pub processes: Vec<Participant>,
}

/// A process of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Participant {
    /// Name of its machine.
    pub host: String,
    /// Number of the process there.
    pub pid: u32,
    /// What its ranks compute on, as run files name it.
    pub device: String,
    /// Model of its CPU: bits are promised on one model.
    pub cpu: String,
    /// The first of its ranks, which follow each other.
    pub first_rank: usize,
    /// How many ranks it holds.
    pub ranks: usize,
}

impl Census {
    /// A run whose ranks are threads of this process.
    pub(crate) fn alone(device: &str, ranks: usize) -> Self {
        let (host, pid, cpu) = (cluster::host(), std::process::id(), cluster::cpu_model());
        let this = Participant { host, pid, device: device.to_owned(), cpu, first_rank: 0, ranks };
        Self { transport: "threads".to_owned(), processes: vec![this] }
    }
}

/// Model FLOP/s utilization, by two conventions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Utilization {
    /// With 6N + 12·L·d·T FLOPs per token (`PaLM`, appendix B).
    pub mfu: f64,
    /// With 6N FLOPs per token: the formula of the XLA FSDP reports.
    pub mfu_6n: f64,
}

/// What the FLOPs of a token depend on.
///
/// Per token, the forward multiplies and adds once with each of the N parameters (2N FLOPs) and the
/// backward twice (4N): 6N. Attention adds scores and weighted values, each 2·d·T FLOPs per layer and
/// token, three times (forward, and twice in backward): 12·L·d·T, not halved for causality. Recomputation
/// does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlopModel {
    /// N: parameters, tied ones once.
    pub parameter_count: u64,
    /// L: layers.
    pub layer_count: u64,
    /// d: heads times head dim.
    pub attention_width: u64,
    /// T: inputs per sample.
    pub seq_len: u64,
}

impl FlopModel {
    /// 6N.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn flops_per_token_6n(&self) -> f64 {
        6.0 * self.parameter_count as f64
    }

    /// 6N + 12·L·d·T.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn flops_per_token(&self) -> f64 {
        let attention = self.layer_count as f64 * self.attention_width as f64 * self.seq_len as f64;
        self.flops_per_token_6n() + 12.0 * attention
    }

    /// The utilization of `ranks` ranks with `peak_tflops` TFLOP/s each that process `tokens_per_s`
    /// together.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn utilization(&self, tokens_per_s: f64, ranks: usize, peak_tflops: f64) -> Utilization {
        let peak_flops_per_s = peak_tflops * 1e12 * ranks as f64;
        Utilization {
            mfu: self.flops_per_token() * tokens_per_s / peak_flops_per_s,
            mfu_6n: self.flops_per_token_6n() * tokens_per_s / peak_flops_per_s,
        }
    }
}

/// Writes metrics, one JSON object per line.
#[derive(Debug)]
pub struct MetricsWriter<W: Write> {
    sink: W,
}

impl MetricsWriter<BufWriter<File>> {
    /// Goes on with a file: lines of later steps than `step` are cut off, and so is a line that is incomplete or
    /// damaged with everything after it. A file that is not there is created. The cut file replaces the old one in
    /// one step, durably; a link is replaced, not followed.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn resume(path: &Path, step: u64) -> io::Result<MetricsWriter<BufWriter<File>>> {
        let bytes = read(path)?.unwrap_or_default();
        // With the last line of a step everything goes that follows it: what said who took part in those that are cut off.
        let kept = lines(&bytes).take_while(|&(done, _)| done <= step).last().map_or(0, |(_, end)| end);
        Ok(MetricsWriter::new(BufWriter::new(whole_file::replace(path, &bytes[..kept])?)))
    }
}

/// The step of the last line that can be read, 0 if there is none; nothing if there is no file.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn last_step(path: &Path) -> io::Result<Option<u64>> {
    Ok(read(path)?.map(|bytes| last_step_in(&bytes)))
}

/// The step of the last line that can be read, 0 if there is none.
pub(crate) fn last_step_in(bytes: &[u8]) -> u64 {
    lines(bytes).last().map_or(0, |(step, _)| step)
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
        }
        Ok(_) => fs::read(path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The step of each line that is one of a step, and where the line ends, up to the first line that is incomplete or damaged.
fn lines(bytes: &[u8]) -> impl Iterator<Item = (u64, usize)> {
    let mut end = 0;
    let lines = bytes.split_inclusive(|&byte| byte == b'\n').map_while(move |line| {
        end += line.len();
        read_line(line.strip_suffix(b"\n")?).map(|line| (line, end))
    });
    lines.filter_map(|(line, end)| match line {
        Line::Start => None,
        Line::Step(step) => Some((step, end)),
    })
}

/// What a line tells.
enum Line {
    /// Who takes part from here on.
    Start,
    /// The figures of this step.
    Step(u64),
}

fn read_line(line: &[u8]) -> Option<Line> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    match value.get(START) {
        Some(_) => Some(Line::Start),
        None => value.get("step")?.as_u64().map(Line::Step),
    }
}

impl<W: Write> MetricsWriter<W> {
    /// Writes to a sink.
    pub fn new(sink: W) -> MetricsWriter<W> {
        MetricsWriter { sink }
    }

    /// Writes and flushes the line of a start after `step` steps.
    ///
    /// # Errors
    /// If the sink fails.
    pub fn start(&mut self, step: u64, census: &Census) -> io::Result<()> {
        let Census { transport, processes } = census;
        let ranks: usize = processes.iter().map(|process| process.ranks).sum();
        let who =
            json!({ "after_step": step, "ranks": ranks, "transport": transport, "processes": processes });
        self.line(&json!({ START: who }))
    }

    /// Writes and flushes the line of a step. Numbers that are not finite become `null`: JSON has none such.
    ///
    /// # Errors
    /// If the sink fails.
    pub fn write(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        self.line(metrics)
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.sink, line)?;
        self.sink.write_all(b"\n")?;
        self.sink.flush()
    }
}

#[cfg(test)]
mod tests;
