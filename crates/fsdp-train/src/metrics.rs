//! What a step reports, and the file it is reported in.
//!
//! `metrics.jsonl` holds one JSON object per step and is flushed after each, so that a run can be watched
//! and an interrupted one keeps what it did. Nothing here reads a clock: the trainer measures.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::Serialize;

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
    /// Creates, or empties, a file.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(path: &Path) -> io::Result<MetricsWriter<BufWriter<File>>> {
        Ok(MetricsWriter::new(BufWriter::new(File::create(path)?)))
    }
}

impl MetricsWriter<BufWriter<File>> {
    /// Goes on with a file: lines of later steps than `step`, and an incomplete last one, are cut off. A file
    /// that is not there is created. The cut file replaces the old one in one step.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn resume(path: &Path, step: u64) -> io::Result<MetricsWriter<BufWriter<File>>> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return MetricsWriter::create(path),
            Err(error) => return Err(error),
        };
        let kept = |line: &&str| line.ends_with('\n') && step_of(line).is_some_and(|done| done <= step);
        let kept: String = text.split_inclusive('\n').take_while(kept).collect();
        let cut = path.with_extension("jsonl.tmp");
        fs::write(&cut, kept)?;
        fs::rename(&cut, path)?;
        Ok(MetricsWriter::new(BufWriter::new(OpenOptions::new().append(true).open(path)?)))
    }
}

/// The step of a line.
fn step_of(line: &str) -> Option<u64> {
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
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
