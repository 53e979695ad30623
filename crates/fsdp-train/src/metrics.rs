//! What a step reports, and the file it is reported in.
//!
//! `metrics.jsonl` holds one JSON object per step and is flushed after each, so that a run can be watched
//! and an interrupted one keeps what it did. Nothing here reads a clock: the trainer measures.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::Serialize;

use crate::whole_file;

/// The name of the file, in the output folder.
pub(crate) const METRICS: &str = "metrics.jsonl";

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

/// The step of each line and where the line ends, up to the first line that is incomplete or damaged.
fn lines(bytes: &[u8]) -> impl Iterator<Item = (u64, usize)> {
    let mut end = 0;
    bytes.split_inclusive(|&byte| byte == b'\n').map_while(move |line| {
        end += line.len();
        step_of(line.strip_suffix(b"\n")?).map(|step| (step, end))
    })
}

/// The step of a line.
fn step_of(line: &[u8]) -> Option<u64> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    value.get("step")?.as_u64()
}

impl<W: Write> MetricsWriter<W> {
    /// Writes to a sink.
    pub fn new(sink: W) -> MetricsWriter<W> {
        MetricsWriter { sink }
    }

    /// Writes and flushes one line. Numbers that are not finite become `null`: JSON has none such.
    ///
    /// # Errors
    /// If the sink fails.
    pub fn write(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        serde_json::to_writer(&mut self.sink, metrics)?;
        self.sink.write_all(b"\n")?;
        self.sink.flush()
    }
}

#[cfg(test)]
mod tests;
